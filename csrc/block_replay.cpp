#include "block_replay.h"

#include <algorithm>
#include <limits>

#include "clock.h"
#include "error.h"
#include "first_touch.h"
#include "parallel.h"

namespace zenflow {
namespace {

// Large enough that handing it out costs nothing, small enough that the last ones leave no thread idle for long.
constexpr uint64_t kChunkElements = 16384;
constexpr float kMaxLookAhead = 1e6f;

}  // namespace

BlockReplay::BlockReplay(const Arena& arena, const StepRecords& records)
    : arena_(arena),
      records_(records),
      kernel_(replay_kernel(arena.gradient_dtype(), arena.weight_dtype(), best_instruction_set())),
      journal_(arena),
      segments_(arena.blocks().size()),
      coefficients_(arena.header().n_param_groups) {
    // Both tables ascend, so one pass over them meets every pair that overlaps.
    auto range = arena.ranges().begin();
    for (size_t b = 0; b < segments_.size(); ++b) {
        const Block& block = arena.blocks()[b];
        while (range != arena.ranges().end() && range->end <= block.begin) ++range;
        for (auto r = range; r != arena.ranges().end() && r->begin < block.end; ++r) {
            const Segment segment{std::max(r->begin, block.begin), std::min(r->end, block.end), r->param_group};
            if (segment.begin < segment.end) segments_[b].push_back(segment);
        }
    }
}

void BlockReplay::check(const Round& round, const uint32_t* pages) const {
    const ArenaHeader& header = arena_.header();
    if (round.block >= header.n_blocks) {
        fail("round: block is ", round.block, ", allowed are numbers below n_blocks = ", header.n_blocks);
    }
    if (round.publish_buffer >= header.n_publish_buffers) {
        fail("round: publish_buffer is ", round.publish_buffer,
             ", allowed are numbers below n_publish_buffers = ", header.n_publish_buffers);
    }
    for (uint32_t i = 0; i < round.n_steps; ++i) {
        if (pages[i] >= header.n_pages) {
            fail("round: pages[", i, "] is ", pages[i], ", allowed are numbers below n_pages = ", header.n_pages);
        }
    }
    if (round.rule > static_cast<uint32_t>(Rule::kAccumulate)) {
        fail("round: rule is ", round.rule, ", allowed are ", static_cast<uint32_t>(Rule::kReplay), " (replay) and ",
             static_cast<uint32_t>(Rule::kAccumulate), " (accumulate)");
    }
    // NaN fails every comparison.
    if (!(round.look_ahead >= 0.0f && round.look_ahead <= kMaxLookAhead)) {
        fail("round: look_ahead is ", round.look_ahead, ", allowed are numbers from 0 to ", kMaxLookAhead);
    }
    if (round.n_updates < 0 || round.n_updates == std::numeric_limits<int64_t>::max()) {
        fail("round: n_updates is ", round.n_updates, ", allowed are numbers from 0");
    }
    if (round.early > 1) fail("round: early is ", round.early, ", allowed are 0 and 1");
    if (round.early == 1 && (round.n_steps != 1 || round.rule != static_cast<uint32_t>(Rule::kReplay))) {
        fail("round: early is 1, but n_steps is ", round.n_steps, " and rule is ", round.rule, "; allowed then are 1 and ",
             static_cast<uint32_t>(Rule::kReplay));
    }
    journal_.check(round);
}

void BlockReplay::touch_states() {
    std::vector<std::vector<Journal::Share>> shares_of_blocks;
    for (uint32_t block = 0; block < segments_.size(); ++block) {
        collect_chunks(block);
        shares_of_blocks.push_back(shares());
    }
    run_in_parallel([&](int thread, int) {
        const auto share = static_cast<size_t>(thread);
        for (const std::vector<Journal::Share>& shares : shares_of_blocks) {
            if (share < shares.size()) zenflow::touch_states(arena_, shares[share]);
        }
    });
}

const std::vector<ThreadSpan>& BlockReplay::run(const Round& round, const uint32_t* pages) {
    collect_coefficients(round, pages);
    collect_chunks(round.block);
    if (!journal_.is_in_hand(round)) journal_.begin(round, shares());
    const size_t n_shares = journal_.n_shares();
    gradients_.resize(n_shares * pages_.size());
    spans_.assign(std::min(n_shares, static_cast<size_t>(n_parallel_threads())), {});
    run_in_parallel([&](int thread, int n_threads) {
        const auto first = static_cast<size_t>(thread);
        if (first >= n_shares) return;
        const int64_t begin_ns = now_ns();
        // As many threads as shares, but for what a worker with another number of threads left.
        for (size_t share = first; share < n_shares; share += static_cast<size_t>(n_threads)) run_share(share, round);
        spans_[first] = {begin_ns, now_ns()};
    });
    journal_.finish(round);
    return spans_;
}

void BlockReplay::collect_coefficients(const Round& round, const uint32_t* pages) {
    pages_.clear();
    for (auto& group : coefficients_) group.clear();
    int64_t last_applied = 0;
    for (uint32_t i = 0; i < round.n_steps; ++i) {
        const int64_t number = round.first_step + i;
        const StepRecords::Step step = round.early != 0 ? records_.early_step(number, round.block) : records_.step(number);
        if (!step.applied) continue;
        last_applied = number;
        pages_.push_back(arena_.page(pages[i]));
        for (uint32_t group = 0; group < coefficients_.size(); ++group) {
            coefficients_[group].push_back(step_coefficients(arena_.hyperparameters(number, group), step.count, step.clip));
        }
    }
    if (static_cast<Rule>(round.rule) != Rule::kAccumulate || pages_.empty()) return;
    const float share = 1.0f / static_cast<float>(pages_.size());
    for (uint32_t group = 0; group < coefficients_.size(); ++group) {
        for (StepCoefficients& step : coefficients_[group]) step.grad_scale *= share;
        coefficients_[group].push_back(step_coefficients(arena_.hyperparameters(last_applied, group), round.n_updates + 1, 1.0f));
    }
}

void BlockReplay::collect_chunks(uint32_t block) {
    chunks_.clear();
    for (const Segment& segment : segments_[block]) {
        for (uint64_t begin = segment.begin; begin < segment.end; begin += kChunkElements) {
            chunks_.push_back({begin, std::min(kChunkElements, segment.end - begin), segment.param_group});
        }
    }
}

// Consecutive chunks, the same of a block in every round: they may still be in the thread's caches.
std::vector<Journal::Share> BlockReplay::shares() const {
    std::vector<Journal::Share> result;
    const size_t n = std::min({chunks_.size(), journal_.max_shares(), static_cast<size_t>(n_parallel_threads())});
    for (size_t i = 0; i < n; ++i) {
        const Chunk& first = chunks_[chunks_.size() * i / n];
        const Chunk& last = chunks_[chunks_.size() * (i + 1) / n - 1];
        result.push_back({first.begin, last.begin + last.size});
    }
    return result;
}

void BlockReplay::run_share(size_t share, const Round& round) {
    JournalSlot& slot = journal_.slot(share);
    const uint64_t block_begin = arena_.blocks()[round.block].begin;
    const uint64_t gradient_bytes = element_bytes(arena_.gradient_dtype());
    const void** const gradients = gradients_.data() + share * pages_.size();
    std::byte* const published = arena_.publish_buffer(round.publish_buffer);
    const auto first = std::partition_point(chunks_.begin(), chunks_.end(),
                                            [&](const Chunk& chunk) { return chunk.begin + chunk.size <= slot.position; });
    for (auto chunk = first; chunk != chunks_.end() && chunk->begin < slot.end; ++chunk) {
        // Past what is done, and past padding.
        slot.position = std::max(slot.position, chunk->begin);
        const uint64_t begin = slot.position;
        for (size_t s = 0; s < pages_.size(); ++s) gradients[s] = pages_[s] + (begin - block_begin) * gradient_bytes;
        const WindowView window{static_cast<Rule>(round.rule), pages_.size(), gradients, coefficients_[chunk->param_group].data(),
                                round.look_ahead};
        kernel_(arena_.master() + begin, arena_.exp_avg() + begin, arena_.exp_avg_sq() + begin, window,
                chunk->begin + chunk->size - begin, published + (begin - block_begin) * element_bytes(arena_.weight_dtype()),
                &slot);
    }
}

}  // namespace zenflow
