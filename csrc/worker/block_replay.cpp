#include "worker/block_replay.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "adamw/stochastic_rounding.h"
#include "common/error.h"
#include "common/parallel.h"

namespace zenflow {

// Large enough to amortize the call of the kernel, small enough to balance the threads.
constexpr uint64_t kSegmentElements = 16384;

BlockReplay::BlockReplay(const Arena& arena, const StepRecords& records)
    : arena_(arena),
      records_(records),
      kernel_(replay_kernel(arena.model_dtype(), arena.moments_dtype(), best_instruction_set())),
      journal_(arena),
      segments_(arena.blocks().size()) {
    // Both tables ascend, so one pass over them finds all overlapping pairs.
    auto range = arena.ranges().begin();
    for (size_t b = 0; b < segments_.size(); ++b) {
        const Block& block = arena.blocks()[b];
        while (range != arena.ranges().end() && range->end <= block.begin) ++range;
        for (auto r = range; r != arena.ranges().end() && r->begin < block.end; ++r) {
            const uint64_t end = std::min(r->end, block.end);
            const size_t group = group_of(*r);
            for (uint64_t begin = std::max(r->begin, block.begin); begin < end; begin += kSegmentElements) {
                const uint64_t scale = r->first_scale + (begin - r->begin) / kTileElements;
                segments_[b].push_back({begin, std::min(begin + kSegmentElements, end), group, scale});
            }
        }
    }
    coefficients_.resize(groups_.size());
}

// The group of a range; adds it if it is new.
size_t BlockReplay::group_of(const Range& range) {
    size_t index = 0;
    const auto is_other = [&range](const Group& g) { return g.param_group != range.param_group || g.n_missed != range.n_missed; };
    while (index < groups_.size() && is_other(groups_[index])) ++index;
    if (index == groups_.size()) groups_.push_back({range.param_group, range.n_missed});
    return index;
}

void BlockReplay::check(const UpdateJob& job, const uint32_t* slots) const {
    const ArenaHeader& header = arena_.header();
    ZENFLOW_CHECK(job.block < header.n_blocks && job.publish_buffer < header.n_publish_buffers);
    ZENFLOW_CHECK(job.tentative <= Tentative::kCorrection);
    ZENFLOW_CHECK(job.tentative != Tentative::kCorrection || job.n_committed == 0);
    for (uint64_t i = 0; i < n_steps_of(job); ++i) ZENFLOW_CHECK(slots[i] < header.n_slots);
}

bool BlockReplay::run(const UpdateJob& job, const uint32_t* slots) {
    journal_.check(job);
    if (journal_.is_complete(job)) {
        journal_.finish(job);
        return false;
    }
    const bool begins = journal_.job_in_progress() == 0;
    BlockShown& of_block = arena_.block_shown(job.block);
    BlockShown shown = of_block;
    if (job.tentative == Tentative::kCorrection) {
        shown = records_.to_show(job);
        if (begins && is_shown(job, shown)) {
            journal_.finish(job);
            return true;
        }
    } else if (job.tentative != Tentative::kNone && begins) {
        shown = of_block = records_.to_show(job);
    }
    collect_coefficients(job, slots, shown);
    if (begins) journal_.begin(job, shares(job.block));
    const size_t n_shares = arena_.live().n_shares;
    gradients_.resize(n_shares * slots_.size());
    run_in_parallel([&](int thread, int n_threads) {
        // One share per thread, unless an earlier worker with more threads began the job.
        for (auto share = static_cast<size_t>(thread); share < n_shares; share += static_cast<size_t>(n_threads)) {
            run_share(share, job);
        }
    });
    journal_.finish(job);
    return true;
}

// Whether the weights that the block's last job in backward has published show the step as `wanted`, which is true.
bool BlockReplay::is_shown(const UpdateJob& job, const BlockShown& wanted) const {
    const BlockShown& shown = arena_.block_shown(job.block);
    if (shown.step != wanted.step) return false;
    if (shown.is_true != 0) return true;
    // Left out in both cases, with any hyperparameters.
    if (!std::isfinite(wanted.factor)) return !std::isfinite(shown.factor);
    const size_t n = arena_.header().n_param_groups;
    const Hyperparameters* const sets = &arena_.hyperparameters(wanted.step, 0);
    return std::memcmp(&shown.factor, &wanted.factor, sizeof(float)) == 0 &&
           std::memcmp(sets, sets + n, n * sizeof(Hyperparameters)) == 0;
}

void BlockReplay::collect_coefficients(const UpdateJob& job, const uint32_t* slots, const BlockShown& shown) {
    slots_.clear();
    for (auto& group : coefficients_) group.clear();
    const auto add = [&](uint32_t i, const StepRecords::Step& step, bool of_second_set) {
        if (!std::isfinite(step.clip)) return;
        slots_.push_back(arena_.slot(slots[i]));
        for (size_t group = 0; group < groups_.size(); ++group) {
            const auto& [param_group, n_missed] = groups_[group];
            require(step.count > n_missed, "invalid input: a range has missed all steps");
            const Hyperparameters& hyperparameters = arena_.hyperparameters(job.first_step + i, param_group, of_second_set);
            coefficients_[group].push_back(step_coefficients(hyperparameters, step.count - n_missed, step.clip));
        }
    };
    for (uint32_t i = 0; i < job.n_committed; ++i) add(i, records_.committed_step(job, i), false);
    n_committed_ = slots_.size();
    if (job.tentative != Tentative::kNone) add(job.n_committed, records_.tentative_step(job, shown), shown.is_true == 0);
}

// Consecutive segments, the same of a block in every job: they may still be in the thread's caches.
std::vector<Journal::Share> BlockReplay::shares(uint32_t block) const {
    const std::vector<Segment>& segments = segments_[block];
    uint64_t numel = 0, before = 0;
    for (const Segment& segment : segments) numel += segment.end - segment.begin;
    std::vector<Journal::Share> result;
    const auto n_threads = static_cast<size_t>(omp_get_max_threads());
    const uint64_t n = std::min({segments.size(), size_t{arena_.header().n_journal_entries}, n_threads});
    for (const Segment& segment : segments) {
        // Small segments go with their neighbours, so that shares have nearly the same number of elements.
        const bool begins = result.empty() || (result.size() < n && before * n >= numel * result.size());
        if (begins) result.push_back({segment.begin, segment.end});
        result.back().end = segment.end;
        before += segment.end - segment.begin;
    }
    return result;
}

void BlockReplay::run_share(size_t share, const UpdateJob& job) {
    JournalEntry& entry = arena_.journal_entry(share);
    const uint32_t seed = noise_seed(static_cast<uint64_t>(job.first_step) + job.n_committed - 1);
    const uint64_t block_begin = arena_.blocks()[job.block].begin;
    const uint64_t model_bytes = element_bytes(arena_.model_dtype());
    const void** const gradients = gradients_.data() + share * slots_.size();
    std::byte* const published = arena_.publish_buffer(job.publish_buffer);
    const std::vector<Segment>& segments = segments_[job.block];
    auto segment = std::partition_point(segments.begin(), segments.end(),
                                        [&](const Segment& candidate) { return candidate.end <= entry.position; });
    for (; segment != segments.end() && segment->begin < entry.end; ++segment) {
        // Skips padding.
        entry.position = std::max(entry.position, segment->begin);
        const uint64_t begin = entry.position, in_block = begin - block_begin;
        for (size_t s = 0; s < slots_.size(); ++s) gradients[s] = slots_[s] + in_block * model_bytes;
        const bool has_tentative = slots_.size() > n_committed_;
        const WindowView window{n_committed_,         gradients,     coefficients_[segment->group].data(),
                                job.prediction_steps, has_tentative, {seed, static_cast<uint32_t>(begin)}};
        const uint64_t scale = segment->first_scale + (begin - segment->begin) / kTileElements;
        kernel_(arena_.state(begin, scale), segment->end - begin, window, published + in_block * model_bytes, entry);
    }
}

}  // namespace zenflow
