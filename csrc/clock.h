// The clock of all times that the worker reports.
#pragma once

#include <chrono>
#include <cstdint>

namespace zenflow {

// CLOCK_MONOTONIC, which the trainer reads as well. Costs some 20 ns.
inline int64_t now_ns() {
    const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since_start).count();
}

}  // namespace zenflow
