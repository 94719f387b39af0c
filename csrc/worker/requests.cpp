#include "worker/requests.h"

#include <unistd.h>

#include <cstddef>

#include "common/error.h"
#include "common/parallel.h"

namespace zenflow {
namespace {

// Reading allocates a page as well, because the mapping is a shared one of a file.
void touch(const void* first, const void* last) {
    const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto end = reinterpret_cast<uintptr_t>(last);
    for (auto at = reinterpret_cast<uintptr_t>(first); at < end; at = (at / page_bytes + 1) * page_bytes) {
        static_cast<void>(*reinterpret_cast<const volatile std::byte*>(at));
    }
}

}  // namespace

void touch_states(const Arena& arena) {
    run_in_parallel([&](int thread, int n_threads) {
        const auto i = static_cast<uint64_t>(thread), n = static_cast<uint64_t>(n_threads);
        for (const auto& [begin, end] : arena.blocks()) {
            // As BlockReplay divides a block. Of the scales, a hundredth of the states, the first job allocates the pages.
            const AnyState first = arena.state(begin + (end - begin) * i / n, 0);
            const AnyState last = arena.state(begin + (end - begin) * (i + 1) / n, 0);
            touch(first.master, last.master);
            touch(first.exp_avg, last.exp_avg);
            touch(first.exp_avg_sq, last.exp_avg_sq);
        }
    });
}

void touch_rows(const Arena& arena, const Touch& request) {
    const uint64_t total = arena.header().total_bytes;
    require(request.offset <= total && request.row_bytes >= 1 && request.n_rows <= (total - request.offset) / request.row_bytes,
            "touch: ", request.n_rows, " rows of row_bytes = ", request.row_bytes, " must lie between offset = ", request.offset,
            " and total_bytes = ", total);
    const auto* const begin = arena.at<const std::byte>(request.offset);
    run_in_parallel([&](int thread, int n_threads) {
        const auto i = static_cast<uint64_t>(thread), n = static_cast<uint64_t>(n_threads);
        for (uint64_t row = 0; row < request.n_rows; ++row) {
            const std::byte* const first = begin + row * request.row_bytes;
            touch(first + request.row_bytes * i / n, first + request.row_bytes * (i + 1) / n);
        }
    });
}

}  // namespace zenflow
