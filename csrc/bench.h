// Measures the replay kernel as the worker runs it.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <vector>

namespace zenflow {

struct BenchOptions {
    std::vector<int> cores;      // one thread pinned to each
    int64_t elements = 1 << 25;  // of one block; master and moments take 12 bytes each
    int64_t repeats = 7;         // of everything, in turn
    int64_t max_steps = 16;      // windows of 1, 2, 4, ... steps
};

// Writes one JSON object a line: first what it runs on, then, for every repeat, an in-place triad a[i] += s * b[i] ("triad",
// which says what memory can do: 12 bytes an element) and the replay of windows of bfloat16 gradients ("replay"). Throws Error.
void run_benchmark(const BenchOptions& options, std::ostream& output);

}  // namespace zenflow
