// The computation of an update job: replay of a window on one block by all threads of the worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adamw/replay_adamw.h"
#include "common/protocol.h"
#include "worker/arena.h"
#include "worker/journal.h"
#include "worker/step_records.h"

namespace zenflow {

// To be used by one thread, which becomes thread 0 of OpenMP's parallel regions. Arena and records must outlive the object.
class BlockReplay {
  public:
    BlockReplay(const Arena& arena, const StepRecords& records);

    // Throws Error if `job` names a block, slot or publish buffer that the arena does not have. `slots` holds one slot index for
    // each of its steps.
    void check(const UpdateJob& job, const uint32_t* slots) const;

    const Journal& journal() const { return journal_; }

    // Executes a checked job whose steps are resolved, or the rest of it; nothing of a kCorrection job whose step is shown so
    // already. Returns false if the job was complete before. All writes of the threads happen before the return. Elements in no
    // range are left alone, in master and moments as well as in the publish buffer. Throws Error if the job cannot be the next
    // one.
    bool run(const UpdateJob& job, const uint32_t* slots);

  private:
    // What has the same coefficients: ranges of one parameter group that have missed as many steps.
    struct Group {
        uint32_t param_group;
        int64_t n_missed;
    };

    // Consecutive elements of one block and one group, at most kSegmentElements of them.
    struct Segment {
        uint64_t begin;  // in the partition
        uint64_t end;
        size_t group;          // index into groups_
        uint64_t first_scale;  // of the tile that begins with the segment, if moments have scales
    };

    size_t group_of(const Range& range);
    bool is_shown(const UpdateJob& job, const BlockShown& wanted) const;
    void collect_coefficients(const UpdateJob& job, const uint32_t* slots, const BlockShown& shown);
    std::vector<Journal::Share> shares(uint32_t block) const;
    void run_share(size_t share, const UpdateJob& job);

    const Arena& arena_;
    const StepRecords& records_;
    const ReplayKernel kernel_;
    Journal journal_;
    std::vector<std::vector<Segment>> segments_;  // per block
    std::vector<Group> groups_;

    // Of the current job; members so that their memory is reused. Applied steps are those that are not left out, the tentative
    // one last.
    size_t n_committed_ = 0;                                   // of the applied steps
    std::vector<const std::byte*> slots_;                      // of the applied steps
    std::vector<std::vector<StepCoefficients>> coefficients_;  // per group, of the applied steps
    std::vector<const void*> gradients_;                       // per share, of the applied steps in the current segment
};

}  // namespace zenflow
