#include "worker/requests.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "adamw/moments_in_8_bits.h"
#include "common/error.h"
#include "common/half.h"
#include "common/parallel.h"

namespace zenflow {
namespace {

// One tile of a checked request.
struct Gather {
    ExportTile tile;
    const uint32_t* columns;  // nullptr: all
    float* target;

    // Copies entries [first, last), counted over the tile. `read(i)` gives the tile's element i.
    template <typename Read>
    void copy(const Read& read, float* to, uint64_t first, uint64_t last) const {
        if (columns == nullptr) {
            for (uint64_t i = first; i < last; ++i) to[i] = read(i);
            return;
        }
        const uint64_t n_columns = tile.n_columns;
        for (uint64_t row = first / n_columns; row * n_columns < last; ++row) {
            const uint64_t row_first = row * n_columns;
            const uint64_t end = std::min(n_columns, last - row_first);
            for (uint64_t i = std::max(first, row_first) - row_first; i < end; ++i)
                to[row_first + i] = read(row * tile.width + columns[i]);
        }
    }
};

// Entries of a tile that are copied in one go from each of the arrays: they stay in the cache's reach.
constexpr uint64_t kEntriesAtOnce = 4096;

// `count` values of type T at `offset`, which must lie in the export section.
template <typename T>
T* in_section(const Arena& arena, const char* what, uint64_t offset, uint64_t count) {
    const uint64_t begin = arena.header().export_offset, end = begin + arena.header().export_bytes;
    require(offset >= begin && offset <= end && offset % alignof(T) == 0 && count <= (end - offset) / sizeof(T), "export: ", what,
            " must lie in the export section, bytes ", begin, " to ", end, ", got ", count, " values of ", sizeof(T),
            " bytes at ", offset);
    return arena.at<T>(offset);
}

Gather checked(const Arena& arena, const ExportTile& tile) {
    const uint64_t numel = arena.header().numel;
    require(tile.width >= 1 && tile.begin <= numel && tile.rows <= (numel - tile.begin) / tile.width,
            "export: a tile must lie in the partition of ", numel, " elements, got ", tile.rows, " x ", tile.width, " at ",
            tile.begin);
    require(tile.n_columns >= 1 && tile.n_columns <= tile.width, "export: n_columns must be from 1 to width = ", tile.width,
            ", got ", tile.n_columns);
    const uint32_t* columns = nullptr;
    if (tile.n_columns < tile.width) {
        columns = in_section<const uint32_t>(arena, "columns", tile.columns_offset, tile.n_columns);
        const uint32_t largest = *std::max_element(columns, columns + tile.n_columns);
        require(largest < tile.width, "export: columns must be below width = ", tile.width, ", got ", largest);
    }
    // At most numel, as a tile's elements are. The limit of the stride keeps the sum below 2^64.
    const uint64_t entries = tile.rows * tile.n_columns;
    require(tile.target_stride <= arena.header().total_bytes, "export: target_stride must be at most total_bytes, got ",
            tile.target_stride);
    float* const target = in_section<float>(arena, "the target", tile.target_offset, 2 * tile.target_stride + entries);
    if (arena.moments_dtype() == DataType::kInt8) {
        const uint64_t n_scales = arena.header().n_scales, n = (tile.rows * tile.width + kTileElements - 1) / kTileElements;
        require(n <= n_scales && tile.first_scale <= n_scales - n, "export: first_scale must be at most ", n_scales, " less the ",
                n, " of a tile, got ", tile.first_scale);
    }
    return {tile, columns, target};
}

// Reading allocates a page as well, because the mapping is a shared one of a file.
void touch(const void* first, const void* last) {
    const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto end = reinterpret_cast<uintptr_t>(last);
    for (auto at = reinterpret_cast<uintptr_t>(first); at < end; at = (at / page_bytes + 1) * page_bytes) {
        static_cast<void>(*reinterpret_cast<const volatile std::byte*>(at));
    }
}

}  // namespace

void export_entries(const Arena& arena, const Export& request) {
    const auto* const tiles = in_section<const ExportTile>(arena, "tiles", request.tiles_offset, request.n_tiles);
    std::vector<Gather> gathers;
    for (uint32_t i = 0; i < request.n_tiles; ++i) gathers.push_back(checked(arena, tiles[i]));
    const auto copy_all = [&](const Gather& gather, uint64_t first, uint64_t last) {
        const AnyState state = arena.state(gather.tile.begin, gather.tile.first_scale);
        const auto copy = [&](int array, const auto& read) {
            gather.copy(read, gather.target + static_cast<uint64_t>(array) * gather.tile.target_stride, first, last);
        };
        const auto copy_floats = [&](int array, const auto* values) {
            copy(array, [values](uint64_t i) { return to_float(values[i]); });
        };
        copy_floats(0, state.master);
        if (arena.moments_dtype() == DataType::kInt8) {
            const auto* const exp_avg = static_cast<const int8_t*>(state.exp_avg);
            const auto* const exp_avg_sq = static_cast<const uint8_t*>(state.exp_avg_sq);
            const MomentScales* const scales = state.scales;
            copy(1, [=](uint64_t i) {
                const MomentScales& of_tile = scales[i / kTileElements];
                const float root = decode_root(exp_avg_sq[i], __builtin_sqrtf(of_tile.exp_avg_sq));
                return decode_exp_avg(exp_avg[i], of_tile.exp_avg, root);
            });
            copy(2, [=](uint64_t i) { return decode_exp_avg_sq(exp_avg_sq[i], scales[i / kTileElements].exp_avg_sq); });
        } else {
            with_type(arena.moments_dtype(), [&](auto value) {
                copy_floats(1, static_cast<const decltype(value)*>(state.exp_avg));
                copy_floats(2, static_cast<const decltype(value)*>(state.exp_avg_sq));
            });
        }
    };
    run_in_parallel([&](int thread, int n_threads) {
        const auto n = static_cast<uint64_t>(n_threads), t = static_cast<uint64_t>(thread);
        for (const Gather& gather : gathers) {
            const uint64_t n_entries = gather.tile.rows * gather.tile.n_columns, last = n_entries * (t + 1) / n;
            for (uint64_t at = n_entries * t / n; at < last; at += kEntriesAtOnce)
                copy_all(gather, at, std::min(at + kEntriesAtOnce, last));
        }
    });
}

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
