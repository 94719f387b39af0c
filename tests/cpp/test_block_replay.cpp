// A round's computation in this process: the split of a block over ranges, chunks and threads.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "arena.h"
#include "block_replay.h"
#include "check.h"
#include "clock.h"
#include "reference_adamw.h"
#include "step_records.h"
#include "trainer_arena.h"

namespace zenflow {
namespace {

using test::ArenaSpec;
using test::error_of;
using test::State;
using test::TrainerArena;

constexpr std::chrono::milliseconds kLong{600000};
constexpr float kUntouched = -77.0f;
constexpr int kThreads = 3;

// Ranges larger and smaller than a chunk, cut by block borders, with padding between them and at the end.
ArenaSpec awkward_spec(DataType type) {
    ArenaSpec spec;
    spec.ranges = {{3, 40000, 0, 0}, {40001, 40002, 1, 0}, {40064, 40064, 0, 0}, {40064, 90001, 1, 0}};
    spec.blocks = {{0, 20000}, {20000, 20003}, {20003, 70000}, {80000, 90112}};
    spec.numel = 90112;
    spec.n_step_records = 8;
    spec.gradient_dtype = spec.weight_dtype = type;
    return spec;
}

Round round_of(uint32_t block, int64_t first_step, uint32_t n_steps, uint32_t publish_buffer = 0) {
    return {static_cast<uint32_t>(MessageType::kRound), block, 1, first_step, n_steps, publish_buffer, 0, 0.0f, 0, 0, 0};
}

void check_awkward_spec(DataType type) {
    const ArenaSpec spec = awkward_spec(type);
    TrainerArena trainer(spec);
    const Arena arena(trainer.fd());
    const StepRecords records(arena, kLong);
    BlockReplay replay(arena, records);
    omp_set_num_threads(kThreads);

    const int64_t n_steps = 3;
    const float clips[] = {0.5f, std::nanf(""), 1.0f};
    const int64_t counts[] = {1, 1, 2};
    for (int64_t s = 0; s < n_steps; ++s) {
        trainer.hyperparameters(1 + s, 0) = {1e-3 * static_cast<double>(s + 1), 0.9, 0.999, 1e-8, 0.1, 1, 0};
        trainer.hyperparameters(1 + s, 1) = {2e-3, 0.8, 0.99, 1e-6, 0.0, 1, 0};
        trainer.write_word(1 + s, clips[s]);
    }
    CHECK(records.resolve(n_steps, [] { return false; }));

    State expected = test::random_state(spec.numel, 3);
    std::memcpy(trainer.master(), expected.master.data(), spec.numel * sizeof(float));
    std::memcpy(trainer.exp_avg(), expected.exp_avg.data(), spec.numel * sizeof(float));
    std::memcpy(trainer.exp_avg_sq(), expected.exp_avg_sq.data(), spec.numel * sizeof(float));

    for (uint32_t b = 0; b < spec.blocks.size(); ++b) {
        const Block& block = spec.blocks[b];
        const size_t size = block.end - block.begin;
        const uint32_t pages[] = {4, 0, 2};
        for (int64_t s = 0; s < n_steps; ++s) {
            const auto bytes = test::encode(test::random_gradient(size, b * 10 + static_cast<uint32_t>(s)), type);
            std::memcpy(trainer.page(pages[s]), bytes.data(), bytes.size());
            std::vector<float> gradient(spec.numel);
            const auto rounded = test::decode(bytes.data(), size, type);
            std::copy(rounded.begin(), rounded.end(), gradient.begin() + static_cast<std::ptrdiff_t>(block.begin));
            for (const Range& range : spec.ranges) {
                const uint64_t begin = std::max(range.begin, block.begin);
                const uint64_t end = std::max(begin, std::min(range.end, block.end));
                test::reference_step(expected, gradient.data(), trainer.hyperparameters(1 + s, range.param_group), counts[s],
                                     clips[s], begin, end);
            }
        }
        const auto untouched = test::encode(std::vector<float>(size, kUntouched), type);
        std::memcpy(trainer.publish_buffer(1), untouched.data(), untouched.size());

        const Round round = round_of(b, 1, n_steps, 1);
        replay.check(round, pages);
        const int64_t begin_ns = now_ns();
        const std::vector<ThreadSpan> spans = replay.run(round, pages);
        const int64_t end_ns = now_ns();
        // Three elements are one thread's, 50,000 are enough for all.
        CHECK(b != 1 || spans.size() == 1);
        CHECK(b != 2 || spans.size() == kThreads);
        for (const ThreadSpan& span : spans) {
            CHECK(begin_ns <= span.begin_ns && span.begin_ns < span.end_ns && span.end_ns <= end_ns);
        }

        std::vector<float> published(size, kUntouched);
        for (const Range& range : spec.ranges) {
            for (uint64_t i = std::max(range.begin, block.begin); i < std::min(range.end, block.end); ++i) {
                published[i - block.begin] = expected.master[i];
            }
        }
        test::check_same_bytes("published", trainer.publish_buffer(1), published, type);
        test::check_same_bits("master", trainer.master(), expected.master.data(), spec.numel);
        test::check_same_bits("exp_avg", trainer.exp_avg(), expected.exp_avg.data(), spec.numel);
        test::check_same_bits("exp_avg_sq", trainer.exp_avg_sq(), expected.exp_avg_sq.data(), spec.numel);
    }
}

TEST(block_replay, equals_reference_on_ranges_that_blocks_cut) {
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) check_awkward_spec(type);
}

TEST(block_replay, publishes_without_steps) {
    ArenaSpec spec;
    spec.weight_dtype = DataType::kBFloat16;
    TrainerArena trainer(spec);
    const Arena arena(trainer.fd());
    const StepRecords records(arena, kLong);
    BlockReplay replay(arena, records);
    for (size_t i = 0; i < spec.numel; ++i) trainer.master()[i] = static_cast<float>(i);
    replay.run(round_of(1, 0, 0), nullptr);
    const auto published = test::decode(trainer.publish_buffer(0), 36, DataType::kBFloat16);
    for (size_t i = 0; i < 36; ++i) CHECK_EQ(published[i], static_cast<float>(64 + i));
}

// Applied while the step's own word is not there yet, each block by its own factor; then the same bits as if it had been.
TEST(block_replay, an_early_round_equals_one_of_the_whole_step) {
    const ArenaSpec spec;
    TrainerArena whole(spec), early(spec);
    for (TrainerArena* trainer : {&whole, &early}) {
        const Arena arena(trainer->fd());
        const StepRecords records(arena, kLong);
        BlockReplay replay(arena, records);
        omp_set_num_threads(kThreads);
        for (size_t i = 0; i < spec.numel; ++i) trainer->master()[i] = 1.0f + static_cast<float>(i);
        for (int64_t step = 1; step <= 3; ++step) {
            for (uint32_t group = 0; group < 2; ++group)
                trainer->hyperparameters(step, group) = {1e-2, 0.9, 0.999, 1e-8, 0.1, 1, 0};
            std::vector<float> gradient(spec.numel, 0.5f * static_cast<float>(step));
            std::memcpy(trainer->page(0), gradient.data(), 64 * sizeof(float));
            const uint32_t page = 0;
            Round round = round_of(0, step, 1);
            // The second step has an infinite gradient somewhere.
            const float clip = step == 2 ? std::nanf("") : 1.0f;
            if (trainer == &early) {
                round.early = 1;
                trainer->write_block_word(0, step, clip);
                CHECK(records.resolve_early(step, 0, [] { return false; }));
            } else {
                trainer->write_word(step, clip);
                CHECK(records.resolve(step, [] { return false; }));
            }
            replay.check(round, &page);
            replay.run(round, &page);
            trainer->write_word(step, clip);
        }
    }
    test::check_same_bits("master", early.master(), whole.master(), spec.numel);
    test::check_same_bits("exp_avg", early.exp_avg(), whole.exp_avg(), spec.numel);
    test::check_same_bits("exp_avg_sq", early.exp_avg_sq(), whole.exp_avg_sq(), spec.numel);
}

// What the caller wrote before a round and reads after it is ordered with all of the threads' work. Everything goes through one
// mapping, so that ThreadSanitizer can tell.
TEST(block_replay, rounds_follow_each_other_without_races) {
    const ArenaSpec spec = awkward_spec(DataType::kFloat32);
    TrainerArena trainer(spec);
    const Arena arena(trainer.fd());
    const StepRecords records(arena, kLong);
    BlockReplay replay(arena, records);
    omp_set_num_threads(kThreads);
    const Block block = spec.blocks[2];
    auto* const published = reinterpret_cast<float*>(arena.publish_buffer(0));
    for (int64_t step = 1; step <= 20; ++step) {
        for (uint32_t group = 0; group < 2; ++group) trainer.hyperparameters(step, group) = {1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 0};
        trainer.write_word(step, 1.0f);
        CHECK(records.resolve(step, [] { return false; }));
        const auto weight = static_cast<float>(step);
        std::fill(arena.master() + block.begin, arena.master() + block.end, weight);
        std::fill(published, published + (block.end - block.begin), 0.0f);
        const uint32_t page = 0;
        replay.run(round_of(2, step, 1), &page);
        // No gradient: decay alone acts.
        for (const uint64_t i : {block.begin, block.end - 1}) {
            CHECK(arena.master()[i] < weight && arena.master()[i] > 0.999f * weight);
            CHECK_EQ(published[i - block.begin], arena.master()[i]);
        }
    }
}

TEST(block_replay, refuses_what_the_arena_does_not_have) {
    TrainerArena trainer{ArenaSpec{}};
    const Arena arena(trainer.fd());
    const StepRecords records(arena, kLong);
    const BlockReplay replay(arena, records);
    const uint32_t pages[] = {5, 6};
    replay.check(round_of(1, 1, 1, 1), pages);
    CHECK_CONTAINS(error_of([&] { replay.check(round_of(2, 1, 1), pages); }),
                   "block is 2, allowed are numbers below n_blocks = 2");
    CHECK_CONTAINS(error_of([&] { replay.check(round_of(1, 1, 1, 2), pages); }),
                   "publish_buffer is 2, allowed are numbers below n_publish_buffers = 2");
    CHECK_CONTAINS(error_of([&] { replay.check(round_of(1, 1, 2), pages); }),
                   "pages[1] is 6, allowed are numbers below n_pages = 6");
    Round early = round_of(1, 1, 2);
    early.early = 1;
    const uint32_t two[] = {0, 1};
    CHECK_CONTAINS(error_of([&] { replay.check(early, two); }), "early is 1, but n_steps is 2");
    early.early = 2;
    CHECK_CONTAINS(error_of([&] { replay.check(early, two); }), "early is 2, allowed are 0 and 1");
}

}  // namespace
}  // namespace zenflow
