#include "journal.h"

#include "error.h"
#include "tile_journal.h"

namespace zenflow {

void Journal::check(const Round& round) const {
    if (round.round_id < 1) fail("round: round_id is ", round.round_id, ", allowed are numbers from 1");
    if (arena_.begun_round() > arena_.completed_round() && round.round_id > arena_.completed_round() &&
        round.round_id != arena_.begun_round()) {
        fail("round: round_id is ", round.round_id, ", but round ", arena_.begun_round(), " has been begun and is not complete");
    }
    if (!is_in_hand(round)) return;
    const Block& block = arena_.blocks()[round.block];
    if (n_shares() > max_shares()) {
        fail("journal: n_shares is ", n_shares(), ", allowed are numbers up to n_journal_slots = ", max_shares());
    }
    uint64_t previous_end = block.begin;
    for (size_t i = 0; i < n_shares(); ++i) {
        const JournalSlot& slot = this->slot(i);
        if (slot.begin < previous_end || slot.position < slot.begin || slot.end < slot.position || slot.end > block.end) {
            fail("journal: slot ", i, " is at ", slot.position, " of [", slot.begin, ", ", slot.end,
                 "), allowed are ascending bounds from ", previous_end, " to ", block.end, ", the end of block ", round.block);
        }
        previous_end = slot.end;
    }
}

bool Journal::is_in_hand(const Round& round) const {
    return round.round_id == arena_.begun_round() && round.round_id > arena_.completed_round();
}

void Journal::begin(const Round& round, const std::vector<Share>& shares) {
    arena_.n_shares() = shares.size();
    for (size_t i = 0; i < shares.size(); ++i) {
        JournalSlot& slot = this->slot(i);
        slot.begin = slot.position = shares[i].begin;
        slot.end = shares[i].end;
        slot.saved_at = kNothingSaved;
    }
    // The slots count from here on and not before.
    order_for_whoever_comes_next();
    arena_.begun_round() = round.round_id;
    order_for_whoever_comes_next();
}

void Journal::finish(const Round& round) {
    order_for_whoever_comes_next();
    arena_.completed_round() = round.round_id;
    order_for_whoever_comes_next();
}

}  // namespace zenflow
