// NUMA placement of the arena's memory by first touch.
#pragma once

#include "worker/arena.h"
#include "worker/journal.h"

namespace zenflow {

// Makes the kernel allocate the pages of a share's master weights and moments on the NUMA node of the calling thread. Only reads;
// pages that are allocated already stay where they are. Thread-safe.
void touch_states(const Arena& arena, const Journal::Share& share);

// Carries out a Touch with all threads of the caller's next parallel region. Throws Error if it leaves the arena.
void touch_rows(const Arena& arena, const Touch& request);

}  // namespace zenflow
