// A round's computation: replay of a window on one block by all threads of the worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arena.h"
#include "journal.h"
#include "protocol.h"
#include "replay_adamw.h"
#include "step_records.h"

namespace zenflow {

// To be used by one thread, which OpenMP's others join. Arena and records must outlive the object.
class BlockReplay {
  public:
    BlockReplay(const Arena& arena, const StepRecords& records);

    // Throws Error, naming field, value and what is allowed, if `round` names a block, page or publish buffer the arena does not
    // have, or cannot follow the rounds before it. `pages` holds round.n_steps page indexes.
    void check(const Round& round, const uint32_t* pages) const;

    // Has the system provide the memory of all blocks' master weights and moments, each part on the thread that will update it,
    // by as many threads as now. Changes nothing.
    void touch_states();

    // Whether a checked round has been carried out before, by this worker or by one that was killed before it could say so.
    bool is_complete(const Round& round) const { return journal_.is_complete(round); }

    // Carries out a checked round that is not complete and whose steps are resolved, or what is left of it. When it returns, what
    // the threads wrote happens before whatever the caller does next. Elements in no range are left alone, in master and moments
    // as well as in the publish buffer. Returns when each thread worked on it: those that had a share, in order. Valid until the
    // next call.
    const std::vector<ThreadSpan>& run(const Round& round, const uint32_t* pages);

  private:
    // Consecutive elements of one block and one parameter group.
    struct Segment {
        uint64_t begin;  // in the partition
        uint64_t end;
        uint32_t param_group;
    };
    // What one thread does without a break.
    struct Chunk {
        uint64_t begin;  // in the partition
        uint64_t size;
        uint32_t param_group;
    };

    void collect_coefficients(const Round& round, const uint32_t* pages);
    void collect_chunks(uint32_t block);
    std::vector<Journal::Share> shares() const;
    void run_share(size_t share, const Round& round);

    const Arena& arena_;
    const StepRecords& records_;
    const ReplayKernel kernel_;
    Journal journal_;
    std::vector<std::vector<Segment>> segments_;  // per block

    // Of the round in hand; members so that their memory is allocated once.
    std::vector<const std::byte*> pages_;                      // of the applied steps
    std::vector<std::vector<StepCoefficients>> coefficients_;  // per parameter group, see WindowView
    std::vector<Chunk> chunks_;
    std::vector<const void*> gradients_;  // per share, of the applied steps of the chunk in hand
    std::vector<ThreadSpan> spans_;       // per thread that has a share
};

}  // namespace zenflow
