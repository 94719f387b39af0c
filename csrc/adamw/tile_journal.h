// The replay kernel's undo log: a tile's update can be interrupted at any instant and repeated with the same bits.
//
// All passes over a tile but the last write to the entry's `saved`; a single update is preceded by a copy to there. Then the tile
// is marked as saved, and the last pass reads `saved` and writes the arena: the result of the last update or, if that one is
// tentative, what it has read. So at every instant either the arena holds the tile before its first update, or `saved` holds it
// before its last pass:
//
//     saved_at != position     the arena's tile at `position` is unchanged; start with the first update
//     saved_at == position     its content is undefined; repeat the last pass, from `saved`
//
// The tile is done, published weights included, once `position` has moved past it. With two passes or more the log costs nothing
// but room in the L1 cache, where `saved` stays. A tentative step alone changes nothing and saves nothing.
//
// The log holds floats, whatever the type of the moments in the arena: those are decoded to there before the first update.
//
// A killed thread has executed a prefix of its instructions, so only the compiler must be kept from reordering.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cpu_features.h"
#include "common/protocol.h"

namespace zenflow {

constexpr uint64_t kNothingSaved = ~uint64_t{0};

ZENFLOW_INLINE void compiler_fence() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

// Begins with the tile at element `position`, which is unchanged.
ZENFLOW_INLINE void start_at(JournalEntry& entry, uint64_t position) {
    entry.position = position;
    entry.saved_at = kNothingSaved;
}

// Whether the current tile continues from `saved`.
ZENFLOW_INLINE bool is_saved(const JournalEntry& entry) { return entry.saved_at == entry.position; }

// The current tile in the arena may be overwritten afterwards.
ZENFLOW_INLINE void mark_saved(JournalEntry& entry) {
    compiler_fence();
    entry.saved_at = entry.position;
    compiler_fence();
}

// The current tile, of `size` elements, is done and published.
ZENFLOW_INLINE void mark_done(JournalEntry& entry, size_t size) {
    compiler_fence();
    entry.position += size;
    compiler_fence();
}

}  // namespace zenflow
