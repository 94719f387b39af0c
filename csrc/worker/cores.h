// The worker's cores: one OpenMP thread on each, and their memory bandwidth.
#pragma once

#include <iosfwd>
#include <string_view>
#include <vector>

namespace zenflow {

// Parses "2,3,5": logical core numbers, at least one. Throws Error.
std::vector<int> parse_cores(std::string_view text);

// Sets the size of OpenMP's parallel regions to one thread per listed core, each pinned to its core; the caller becomes the
// first. Throws Error if the environment limits the number of threads, or a core is not usable; unless `all`, its thread is then
// left where the system puts it.
void pin_threads(const std::vector<int>& cores, bool all);

// Writes the memory bandwidth of these cores in GB/s, three times in lines of their own: of an in-place triad a[i] += s * b[i]
// over 128 MiB, more than most caches hold. Throws Error.
void run_triad(const std::vector<int>& cores, std::ostream& output);

}  // namespace zenflow
