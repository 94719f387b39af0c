// A round's computation: replay of a window on one block by all threads of the worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arena.h"
#include "protocol.h"
#include "replay_adamw.h"
#include "step_records.h"

namespace zenflow {

// To be used by one thread, which OpenMP's others join. Arena and records must outlive the object.
class BlockReplay {
  public:
    BlockReplay(const Arena& arena, const StepRecords& records);

    // Throws Error, naming field, value and what is allowed, if `round` names a block, page or publish buffer the arena does not
    // have. `pages` holds round.n_steps page indexes.
    void check(const Round& round, const uint32_t* pages) const;

    // Carries out a checked round whose steps are resolved. When it returns, what the threads wrote happens before whatever the
    // caller does next. Elements in no range are left alone, in master and moments as well as in the publish buffer.
    void run(const Round& round, const uint32_t* pages);

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
        size_t first_gradient;  // in gradients_
    };

    void collect_coefficients(const Round& round, const uint32_t* pages);
    void collect_chunks(const Round& round);
    void run_chunk(const Chunk& chunk, const Round& round, const Block& block, std::byte* publish_buffer);

    const Arena& arena_;
    const StepRecords& records_;
    const ReplayKernel kernel_;
    std::vector<std::vector<Segment>> segments_;  // per block

    // Of the round in hand; members so that their memory is allocated once.
    std::vector<const std::byte*> pages_;                      // of the applied steps
    std::vector<std::vector<StepCoefficients>> coefficients_;  // per parameter group, see WindowView
    std::vector<Chunk> chunks_;
    std::vector<const void*> gradients_;  // per chunk, of the applied steps
};

}  // namespace zenflow
