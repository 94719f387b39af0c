// Which cores the worker computes on.
#pragma once

#include <string_view>
#include <vector>

namespace zenflow {

// Reads "2,3,5": numbers of logical cores, at least one, none twice. Throws Error.
std::vector<int> parse_cores(std::string_view text);

// Makes OpenMP's parallel regions consist of one thread per listed core, pinned to it; the caller is the first of them. Throws
// Error if a core cannot be used, naming it and those that can, or if the environment keeps OpenMP from starting that many
// threads.
void pin_threads(const std::vector<int>& cores);

}  // namespace zenflow
