// Thread placement: one OpenMP thread per core.
#pragma once

#include <string_view>
#include <vector>

namespace zenflow {

// Parses "2,3,5": distinct logical core numbers, at least one. Throws Error.
std::vector<int> parse_cores(std::string_view text);

// Sets the size of OpenMP's parallel regions to one thread per listed core, each pinned to its core; the caller becomes the
// first. Throws Error if a core is not usable or the environment limits the number of threads.
void pin_threads(const std::vector<int>& cores);

}  // namespace zenflow
