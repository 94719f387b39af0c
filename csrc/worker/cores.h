// Thread placement: one OpenMP thread per core.
#pragma once

#include <string_view>
#include <vector>

namespace zenflow {

// Parses "2,3,5": distinct logical core numbers, at least one. Throws Error.
std::vector<int> parse_cores(std::string_view text);

// Sets the size of OpenMP's parallel regions to one thread per listed core, each pinned to its core; the caller becomes the
// first. Throws Error if the environment limits the number of threads, or a core is not usable; unless `all`, its thread is then
// left where the system puts it.
void pin_threads(const std::vector<int>& cores, bool all);

}  // namespace zenflow
