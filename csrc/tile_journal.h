// How the kernel updates a tile so that it can be killed at any instant, and whoever comes next finishes the tile with the same
// bits.
//
// All updates of a tile but the last go to the slot's `saved`; a single update is preceded by a copy to there instead. Then the
// tile is marked as saved, and the last update reads `saved` and writes the arena. So at every instant either the arena holds the
// tile before its first update, or `saved` holds it before its last one; the marks say which:
//
//     saved_at != position     the arena's tile at `position` is as it was before the round; begin with the first update
//     saved_at == position     it may be anything; do the last update once more, from `saved`
//
// The tile counts as done, published weights included, once `position` has moved past it. For two updates or more that costs
// nothing but room in the first-level cache, where `saved` stays.
//
// A killed thread has carried out a prefix of its instructions, so the compiler alone must keep the order; hence signal fences.
// Everything here is always inlined, for the reason that half.h gives.
#pragma once

#include <cstddef>
#include <cstdint>

#include "half.h"
#include "protocol.h"

namespace zenflow {

constexpr uint64_t kNothingSaved = ~uint64_t{0};

ZENFLOW_INLINE void order_for_whoever_comes_next() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

// Whether the tile in hand goes on from `saved`.
ZENFLOW_INLINE bool is_saved(const JournalSlot& slot) { return slot.saved_at == slot.position; }

// From here on the arena's tile may be overwritten.
ZENFLOW_INLINE void mark_saved(JournalSlot& slot) {
    order_for_whoever_comes_next();
    slot.saved_at = slot.position;
    order_for_whoever_comes_next();
}

// The tile in hand, of `size` elements, is done and published.
ZENFLOW_INLINE void mark_done(JournalSlot& slot, size_t size) {
    order_for_whoever_comes_next();
    slot.position += size;
    order_for_whoever_comes_next();
}

}  // namespace zenflow
