#include "block_replay.h"

#include <algorithm>

#include "error.h"
#include "parallel.h"

namespace zenflow {
namespace {

// Large enough that handing it out costs nothing, small enough that the last ones leave no thread idle for long.
constexpr uint64_t kChunkElements = 16384;

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
        for (size_t i = begin; i < end; ++i) run_chunk(chunks_[i], block, publish_buffer);
    });
}

void BlockReplay::collect_coefficients(const Round& round, const uint32_t* pages) {
    pages_.clear();
    for (auto& group : coefficients_) group.clear();
    for (uint32_t i = 0; i < round.n_steps; ++i) {
        const int64_t number = round.first_step + i;
        const StepRecords::Step step = records_.step(number);
        if (!step.applied) continue;
        pages_.push_back(arena_.page(pages[i]));
        for (uint32_t group = 0; group < coefficients_.size(); ++group) {
            coefficients_[group].push_back(step_coefficients(arena_.hyperparameters(number, group), step.count, step.clip));
        }
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

void BlockReplay::run_chunk(const Chunk& chunk, const Block& block, std::byte* publish_buffer) {
    kernel_(arena_.master() + chunk.begin, arena_.exp_avg() + chunk.begin, arena_.exp_avg_sq() + chunk.begin,
            gradients_.data() + chunk.first_gradient, coefficients_[chunk.param_group].data(), pages_.size(), chunk.size,
            publish_buffer + (chunk.begin - block.begin) * element_bytes(arena_.weight_dtype()));
}

}  // namespace zenflow
