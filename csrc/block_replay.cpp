#include "block_replay.h"

#include <algorithm>

#include "error.h"
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
    if (round.n_updates < 0) fail("round: n_updates is ", round.n_updates, ", allowed are numbers from 0");
}

void BlockReplay::run(const Round& round, const uint32_t* pages) {
    collect_coefficients(round, pages);
    collect_chunks(round);
    const Block& block = arena_.blocks()[round.block];
    std::byte* const publish_buffer = arena_.publish_buffer(round.publish_buffer);

    // Each thread takes consecutive chunks, the same of a block in every round: they may still be in its caches.
    run_in_parallel([&](int thread, int n_threads) {
        const size_t begin = chunks_.size() * static_cast<size_t>(thread) / static_cast<size_t>(n_threads);
        const size_t end = chunks_.size() * static_cast<size_t>(thread + 1) / static_cast<size_t>(n_threads);
        for (size_t i = begin; i < end; ++i) run_chunk(chunks_[i], round, block, publish_buffer);
    });
}

void BlockReplay::collect_coefficients(const Round& round, const uint32_t* pages) {
    pages_.clear();
    for (auto& group : coefficients_) group.clear();
    int64_t last_applied = 0;
    for (uint32_t i = 0; i < round.n_steps; ++i) {
        const int64_t number = round.first_step + i;
        const StepRecords::Step step = records_.step(number);
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

void BlockReplay::collect_chunks(const Round& round) {
    const uint64_t block_begin = arena_.blocks()[round.block].begin;
    const uint64_t gradient_bytes = element_bytes(arena_.gradient_dtype());
    chunks_.clear();
    gradients_.clear();
    for (const Segment& segment : segments_[round.block]) {
        for (uint64_t begin = segment.begin; begin < segment.end; begin += kChunkElements) {
            chunks_.push_back({begin, std::min(kChunkElements, segment.end - begin), segment.param_group, gradients_.size()});
            for (const std::byte* const page : pages_) gradients_.push_back(page + (begin - block_begin) * gradient_bytes);
        }
    }
}

void BlockReplay::run_chunk(const Chunk& chunk, const Round& round, const Block& block, std::byte* publish_buffer) {
    const WindowView window{static_cast<Rule>(round.rule), pages_.size(), gradients_.data() + chunk.first_gradient,
                            coefficients_[chunk.param_group].data(), round.look_ahead};
    kernel_(arena_.master() + chunk.begin, arena_.exp_avg() + chunk.begin, arena_.exp_avg_sq() + chunk.begin, window, chunk.size,
            publish_buffer + (chunk.begin - block.begin) * element_bytes(arena_.weight_dtype()));
}

}  // namespace zenflow
