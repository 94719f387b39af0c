// Which round is in hand, and who does which part of it: what a new worker needs to carry on where a killed one was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arena.h"
#include "protocol.h"

namespace zenflow {

// The worker's view of the journal in the arena. To be used by one thread, but for the slots of the round in hand, each of which
// belongs to one thread at a time. The arena must outlive the object.
class Journal {
  public:
    // Elements [begin, end) of the partition that one thread works off in order.
    struct Share {
        uint64_t begin;
        uint64_t end;
    };

    explicit Journal(const Arena& arena) : arena_(arena) {}

    // Throws Error, naming field, value and what is allowed, if `round` cannot follow the rounds before it, or if it is the one
    // in hand and the journal does not fit its block.
    void check(const Round& round) const;

    // Whether the round, a checked one, has been completed, by whatever worker.
    bool is_complete(const Round& round) const { return round.round_id <= arena_.completed_round(); }

    // Whether another worker was killed while it had this round in hand; its shares and slots then say how far it was.
    bool is_in_hand(const Round& round) const;

    size_t max_shares() const { return arena_.header().n_journal_slots; }

    // Takes a round in hand that is neither complete nor in hand; at most max_shares() shares, ascending and disjoint.
    void begin(const Round& round, const std::vector<Share>& shares);

    // Of the round in hand.
    size_t n_shares() const { return arena_.n_shares(); }
    JournalSlot& slot(size_t share) const { return arena_.journal_slot(share); }

    // The round in hand is complete.
    void finish(const Round& round);

  private:
    const Arena& arena_;
};

}  // namespace zenflow
