// Where memory comes from on machines with several NUMA nodes.
#pragma once

#include "arena.h"
#include "journal.h"

namespace zenflow {

// Has the system provide the memory of a share's master weights and moments, which it takes from the NUMA node of the thread that
// is the first to touch it. Reads only, so whatever is there already stays; memory that is there already stays where it is.
void touch_states(const Arena& arena, const Journal::Share& share);

}  // namespace zenflow
