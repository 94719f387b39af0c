#include "worker/journal.h"

#include "adamw/tile_journal.h"
#include "common/error.h"

namespace zenflow {

void Journal::check(const UpdateJob& job) const {
    const int64_t in_progress = job_in_progress();
    if (in_progress == 0 || is_complete(job)) return;
    require(job.job_id == in_progress, "job: job_id must be ", in_progress, ", the job in progress, got ", job.job_id);
    const Block& block = arena_.blocks()[job.block];
    const uint64_t n_entries = arena_.header().n_journal_entries, n_shares = arena_.n_shares();
    require(n_shares <= n_entries, "journal: n_shares must be at most n_journal_entries = ", n_entries, ", got ", n_shares);
    uint64_t previous_end = block.begin;
    for (size_t i = 0; i < n_shares; ++i) {
        const JournalEntry& e = arena_.journal_entry(i);
        require(e.begin >= previous_end && e.position >= e.begin && e.end >= e.position && e.end <= block.end, "journal: entry ",
                i, " must have ascending bounds from ", previous_end, " to the end of block ", job.block, ", ", block.end,
                ", got position ", e.position, " in [", e.begin, ", ", e.end, ")");
        previous_end = e.end;
    }
}

void Journal::begin(const UpdateJob& job, const std::vector<Share>& shares) {
    arena_.n_shares() = shares.size();
    for (size_t i = 0; i < shares.size(); ++i) {
        JournalEntry& entry = arena_.journal_entry(i);
        entry.begin = shares[i].begin;
        entry.end = shares[i].end;
        start_at(entry, shares[i].begin);
    }
    // The entries become valid with this store.
    compiler_fence();
    arena_.begun_job() = job.job_id;
    compiler_fence();
}

void Journal::finish(const UpdateJob& job) {
    compiler_fence();
    if (!is_complete(job)) arena_.completed_job_of(job.block) = job.job_id;
    // A worker that is killed here leaves a job that is complete and in progress: it is finished when it is submitted again.
    compiler_fence();
    if (job.job_id == arena_.begun_job()) arena_.completed_job() = job.job_id;
    compiler_fence();
}

}  // namespace zenflow
