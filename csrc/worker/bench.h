// What the executable does beside serving a trainer: a benchmark of the replay kernel as the worker runs it.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <vector>

namespace zenflow {

struct BenchOptions {
    int64_t elements = 1 << 25;  // of one block; master and moments take 12 bytes each
    int64_t repeats = 7;         // of all measurements, interleaved
    int64_t max_steps = 16;      // windows of 1, 2, 4, ... steps
};

// Writes one JSON object a line: the configuration, then for each repeat an in-place triad a[i] += s * b[i] ("triad", the memory
// bandwidth limit: 12 bytes per element), the replay of windows of bfloat16 gradients ("replay"), a window of one step and a
// tentative step ("one behind"), and single steps with bfloat16 moments. Throws Error.
void run_benchmark(const std::vector<int>& cores, const BenchOptions& options, std::ostream& output);

}  // namespace zenflow
