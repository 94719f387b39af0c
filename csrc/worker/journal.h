// The journal of the job in progress: which thread has which part of it, and how far each one is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/protocol.h"
#include "worker/arena.h"

namespace zenflow {

// The worker's view of the journal in the arena, which must outlive the object. Not thread-safe, except for the entries of the
// job in progress, each of which belongs to one thread at a time.
class Journal {
  public:
    // Elements [begin, end) of the partition that one thread processes in order.
    struct Share {
        uint64_t begin;
        uint64_t end;
    };

    explicit Journal(const Arena& arena) : arena_(arena) {}

    // Throws Error if another job is in progress, or if this one is and the journal does not fit its block.
    void check(const UpdateJob& job) const;

    // Whether the job has been completed, by this worker or an earlier one.
    bool is_complete(const UpdateJob& job) const { return job.job_id <= arena_.completed_job_of(job.block); }

    // The job during which an earlier worker was killed, or 0; its shares and entries say how far it was.
    int64_t job_in_progress() const { return arena_.begun_job() == arena_.completed_job() ? 0 : arena_.begun_job(); }

    // Begins a job that is neither complete nor in progress; at most n_journal_entries shares, ascending and disjoint. While it
    // is in progress, `Arena::n_shares` and `Arena::journal_entry` are its shares'.
    void begin(const UpdateJob& job, const std::vector<Share>& shares);

    // Marks the job in progress as complete; does nothing to one that is.
    void finish(const UpdateJob& job);

  private:
    const Arena& arena_;
};

}  // namespace zenflow
