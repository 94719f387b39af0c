// The journal of the job in progress: which thread has which part of it, and how far each one is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adamw/tile_journal.h"
#include "common/error.h"
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
    void check(const UpdateJob& job) const {
        const int64_t in_progress = job_in_progress();
        if (in_progress == 0 || is_complete(job)) return;
        ZENFLOW_CHECK(job.job_id == in_progress);
        const Block& block = arena_.blocks()[job.block];
        const uint64_t n_shares = arena_.live().n_shares;
        ZENFLOW_CHECK(n_shares <= arena_.header().n_journal_entries);
        uint64_t previous_end = block.begin;
        for (size_t i = 0; i < n_shares; ++i) {
            const JournalEntry& e = arena_.journal_entry(i);
            ZENFLOW_CHECK(e.begin >= previous_end && e.position >= e.begin && e.end >= e.position && e.end <= block.end);
            previous_end = e.end;
        }
    }

    // Whether the job has been completed, by this worker or an earlier one.
    bool is_complete(const UpdateJob& job) const { return job.job_id <= arena_.completed_job_of(job.block); }

    // The job during which an earlier worker was killed, or 0; its shares and entries say how far it was.
    int64_t job_in_progress() const {
        return arena_.live().begun_job == arena_.live().completed_job ? 0 : arena_.live().begun_job;
    }

    // Begins a job that is neither complete nor in progress; at most n_journal_entries shares, ascending and disjoint. While it
    // is in progress, the header's n_shares and `Arena::journal_entry` are its shares'.
    void begin(const UpdateJob& job, const std::vector<Share>& shares) {
        arena_.live().n_shares = shares.size();
        for (size_t i = 0; i < shares.size(); ++i) {
            JournalEntry& entry = arena_.journal_entry(i);
            entry.begin = shares[i].begin;
            entry.end = shares[i].end;
            start_at(entry, shares[i].begin);
        }
        // The entries become valid with this store.
        compiler_fence();
        arena_.live().begun_job = job.job_id;
        compiler_fence();
    }

    // Marks the job in progress as complete; does nothing to one that is.
    void finish(const UpdateJob& job) {
        compiler_fence();
        if (!is_complete(job)) arena_.completed_job_of(job.block) = job.job_id;
        // A worker that is killed here leaves a job that is complete and in progress: it is finished when it is submitted again.
        compiler_fence();
        if (job.job_id == arena_.live().begun_job) arena_.live().completed_job = job.job_id;
        compiler_fence();
    }

  private:
    const Arena& arena_;
};

}  // namespace zenflow
