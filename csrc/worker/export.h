// Exact state of the entries that the training device owns, gathered for its copies.
#pragma once

#include "common/protocol.h"
#include "worker/arena.h"

namespace zenflow {

// Carries out an Export with all threads of the caller's next parallel region; all writes happen before the return. Reads master
// weights and moments, so no job may run at the same time. Throws Error if the request leaves the partition or the export
// section.
void export_entries(const Arena& arena, const Export& request);

}  // namespace zenflow
