// What the worker does beside jobs: NUMA placement of the arena's memory by first touch.
#pragma once

#include "common/protocol.h"
#include "worker/arena.h"

namespace zenflow {

// Makes the kernel allocate the pages of all blocks' master weights and moments on the NUMA nodes of the threads that will update
// them, those of the caller's next parallel region. Only reads; pages that are allocated already stay where they are.
void touch_states(const Arena& arena);

// Carries out a Touch with all threads of the caller's next parallel region. Throws Error if it leaves the arena.
void touch_rows(const Arena& arena, const Touch& request);

}  // namespace zenflow
