// The computation of an update job: how a block is divided among ranges, segments and threads.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "adamw/tile_journal.h"
#include "check.h"
#include "reference_adamw.h"
#include "trainer_arena.h"
#include "worker/arena.h"
#include "worker/block_replay.h"
#include "worker/step_records.h"

namespace zenflow {
namespace {

using test::ArenaSpec;
using test::error_of;
using test::job_of;
using test::kDecoupled;
using test::State;
using test::tentative;
using test::TrainerArena;

constexpr int kThreads = 3;

// An arena with the worker's objects on it.
struct Fixture {
    TrainerArena trainer;
    Arena arena{trainer.fd()};
    StepRecords records{arena};
    BlockReplay replay{arena, records};

    explicit Fixture(const ArenaSpec& spec) : trainer(spec) { omp_set_num_threads(kThreads); }

    void run(const UpdateJob& job, const std::vector<uint32_t>& slots) {
        replay.check(job, slots.data());
        CHECK(records.resolve(job));
        replay.run(job, slots.data());
    }
};

// Ranges larger and smaller than a segment, cut by block borders, with padding between them and at the end.
ArenaSpec awkward_spec(DataType type) {
    ArenaSpec spec;
    spec.ranges = {{3, 40000, 0, 0, 0}, {40001, 40002, 1, 0, 0}, {40064, 40064, 0, 0, 0}, {40064, 90001, 1, 0, 0}};
    spec.blocks = {{0, 20000}, {20000, 20003}, {20003, 70000}, {80000, 90112}};
    spec.numel = 90112;
    spec.n_step_records = 8;
    spec.model_dtype = type;
    return spec;
}

// Three steps, each shown in its own backward pass with a predicted factor and another learning rate and committed one step
// later, then a flush. Each block sees steps without a finite factor: predicted (0), true (1), both (2).
void check_one_behind(DataType type, DataType moments) {
    ArenaSpec spec = awkward_spec(type);
    spec.moments_dtype = moments;
    Fixture fixture(spec);
    TrainerArena& trainer = fixture.trainer;
    trainer.set_state(test::random_state(spec.numel, 3));
    State committed = trainer.read_state();
    const float nan = std::nanf("");
    const float clips[] = {0.5f, nan, 0.25f}, predictions[] = {0.75f, nan, nan};
    const int64_t counts[] = {1, 1, 2}, counts_shown[] = {1, 2, 2};
    int64_t job_id = 0;
    for (int64_t step = 1; step <= 4; ++step) {
        const auto now = static_cast<uint32_t>(step % 2), before = static_cast<uint32_t>((step - 1) % 2);
        const auto gradient_of = [&spec](int64_t step, uint32_t b) {
            return test::random_gradient(spec.blocks[b].end - spec.blocks[b].begin, static_cast<uint32_t>(step) * 10 + b);
        };
        for (uint32_t group = 0; group < 2 && step <= 3; ++group) {
            trainer.tentative_hyperparameters(step, group) = group == 0 ? kDecoupled : test::kGradientDecay;
        }
        for (uint32_t b = 0; b < spec.blocks.size(); ++b) {
            UpdateJob job = job_of(b, ++job_id, step > 1 ? step - 1 : step, (step > 1 ? 1 : 0) + (step <= 3 ? 1 : 0), 1);
            std::vector<uint32_t> slots;
            if (step > 1) {
                slots.push_back(2 * b % 4 + before);
                trainer.set_gradient(slots[0], gradient_of(step - 1, b));
                trainer.expect_step(committed, b, step - 1, gradient_of(step - 1, b), counts[step - 2], clips[step - 2]);
            }
            State shown = committed;
            if (step > 1 && !std::isnan(clips[step - 2])) trainer.expect_rounded(committed, b, step - 1);
            if (step <= 3) {
                slots.push_back(2 * b % 4 + now);
                trainer.set_gradient(slots.back(), gradient_of(step, b));
                trainer.write_block_word(b, step, predictions[step - 1]);
                trainer.expect_step(shown, b, step, gradient_of(step, b), counts_shown[step - 1], predictions[step - 1], true);
                job = tentative(job);
            }
            const std::vector<float> padding(3, -77.0f);  // before the first range
            const auto untouched = test::encode(padding, type);
            std::copy(untouched.begin(), untouched.end(), trainer.publish_buffer(1));
            fixture.run(job, slots);
            if (b == 0) test::check_same_bytes("padding", trainer.publish_buffer(1), padding, type);
            // Three elements are one thread's share, 50,000 suffice for all.
            CHECK(b != 1 || trainer.header().n_shares == 1);
            CHECK(b != 2 || trainer.header().n_shares == kThreads);
            trainer.check_published(b, 1, shown);
            test::check_same_state("block " + std::to_string(b), trainer.read_state().view(), committed);
        }
        // The end of the step: its factor and a hook's learning rate.
        if (step > 3) break;
        trainer.hyperparameters(step, 0) = trainer.hyperparameters(step, 1) = kDecoupled;
        trainer.hyperparameters(step, 1).lr = 2e-3;
        trainer.write_word(step, clips[step - 1]);
        // The weights once more, with what is true; in step 2 there is nothing to do.
        for (uint32_t b = 0; b < spec.blocks.size() && step != 2; ++b) {
            State shown = committed;
            trainer.set_gradient(2 * b % 4 + now, gradient_of(step, b));
            trainer.expect_step(shown, b, step, gradient_of(step, b), counts[step - 1], clips[step - 1]);
            fixture.run(tentative(job_of(b, ++job_id, step, 1, 1), Tentative::kCorrection), {2 * b % 4 + now});
            trainer.check_published(b, 1, shown);
            test::check_same_state("block " + std::to_string(b), trainer.read_state().view(), committed);
        }
    }
}

TEST(block_replay, one_behind_shows_the_tentative_step_and_commits_the_true_one) {
    check_one_behind(DataType::kFloat32, DataType::kFloat32);
    check_one_behind(DataType::kBFloat16, DataType::kInt8);
    check_one_behind(DataType::kFloat16, DataType::kBFloat16);
}

// Weights that show the true step already are left as they are.
TEST(block_replay, publishes_again_only_what_was_predicted_wrongly) {
    struct Case {
        Tentative kind;
        float predicted, clip;
        double lr;     // true one; 1e-3 in backward
        bool arrived;  // the step's word, when the job in backward begins
        bool expected;
    };
    const float nan = std::nanf("");
    const Case cases[] = {
        {Tentative::kPredicted, 0.5f, 0.5f, 1e-3, false, false},   {Tentative::kPredicted, 0.5f, 0.25f, 1e-3, false, true},
        {Tentative::kPredicted, 0.5f, 0.5f, 2e-3, true, true},     {Tentative::kPredicted, nan, nan, 2e-3, false, false},
        {Tentative::kPredicted, 0.5f, nan, 1e-3, false, true},     {Tentative::kTrueIfKnown, 0.5f, 0.25f, 2e-3, false, true},
        {Tentative::kTrueIfKnown, 0.5f, 0.25f, 2e-3, true, false},
    };
    for (const Case& c : cases) {
        const ArenaSpec spec;
        Fixture fixture(spec);
        TrainerArena& trainer = fixture.trainer;
        State expected = test::random_state(spec.numel, 5);
        trainer.set_state(expected);
        const auto gradient = test::random_gradient(spec.blocks[0].end, 6);
        trainer.set_gradient(0, gradient);
        trainer.set_hyperparameters(1, {kDecoupled, kDecoupled});
        trainer.tentative_hyperparameters(1, 0).lr = 1e-3;
        trainer.hyperparameters(1, 0).lr = c.lr;
        trainer.write_block_word(0, 1, c.predicted);
        if (c.arrived) trainer.write_word(1, c.clip);
        fixture.run(tentative(job_of(0, 1, 1, 1), c.kind), {0});
        trainer.write_word(1, c.clip);
        const std::vector<std::byte> before(trainer.publish_buffer(0), trainer.publish_buffer(0) + 40 * sizeof(float));
        // A change that only a new publication would undo.
        trainer.publish_buffer(0)[0] ^= std::byte{1};
        fixture.run(tentative(job_of(0, 2, 1, 1), Tentative::kCorrection), {0});
        const bool is_published = trainer.publish_buffer(0)[0] != (before[0] ^ std::byte{1});
        CHECK_EQ(is_published, c.expected);
        CHECK_EQ(trainer.completed_job_of(0), 2);
        trainer.publish_buffer(0)[0] = is_published ? trainer.publish_buffer(0)[0] : before[0];
        trainer.expect_step(expected, 0, 1, gradient, 1, c.clip);
        trainer.check_published(0, 0, expected);
    }
}

// Ranges of one parameter group, some of which have been frozen for some of the five steps before.
TEST(block_replay, ranges_count_the_steps_in_which_they_were_trained) {
    ArenaSpec spec;
    spec.ranges = {{0, 10, 0, 0, 0}, {10, 20, 0, 0, 5}, {20, 40, 0, 0, 3}, {48, 64, 1, 0, 0}, {64, 100, 1, 0, 3}};
    for (const DataType moments : {DataType::kFloat32, DataType::kInt8}) {
        spec.moments_dtype = moments;
        Fixture fixture(spec);
        TrainerArena& trainer = fixture.trainer;
        trainer.record(0).count = 5;
        trainer.set_state(test::random_state(spec.numel, 7));
        State committed = trainer.read_state();
        for (const int64_t step : {1, 2}) trainer.set_hyperparameters(step, {kDecoupled, test::kGradientDecay});
        trainer.write_word(1, 0.5f);
        for (const uint32_t b : {0u, 1u}) {
            const std::vector<float> gradient = test::random_gradient(spec.blocks[b].end - spec.blocks[b].begin, 8 + b);
            trainer.set_gradient(0, gradient);
            trainer.write_block_word(b, 2, 0.25f);
            fixture.run(tentative(job_of(b, b + 1, 1, 2)), {0, 0});
            trainer.expect_step(committed, b, 1, gradient, 6, 0.5f);
            State shown = committed;
            trainer.expect_step(shown, b, 2, gradient, 7, 0.25f);
            trainer.expect_rounded(committed, b, 1);
            trainer.check_published(b, 0, shown);
            test::check_same_state("block " + std::to_string(b), trainer.read_state().view(), committed);
        }
    }
}

TEST(block_replay, rejects_ranges_that_have_missed_all_steps) {
    ArenaSpec spec;
    spec.ranges[0].n_missed = 1;
    Fixture fixture(spec);
    fixture.trainer.set_hyperparameters(1, {kDecoupled, kDecoupled});
    fixture.trainer.write_word(1, 1.0f);
    CHECK_CONTAINS(error_of([&] { fixture.run(job_of(0, 1, 1, 1), {0}); }),
                   "the count of step 1 must be more than the 1 steps that ranges have missed, got 1");
    CHECK_EQ(fixture.replay.job_in_progress(), 0);
}

// The caller's writes before a job and its reads after it are ordered with the threads' work. Everything uses one mapping, so
// that ThreadSanitizer detects races.
TEST(block_replay, successive_jobs_do_not_race) {
    const ArenaSpec spec = awkward_spec(DataType::kFloat32);
    Fixture fixture(spec);
    const Arena& arena = fixture.arena;
    const Block block = spec.blocks[2];
    auto* const published = reinterpret_cast<float*>(arena.publish_buffer(0));
    for (int64_t step = 1; step <= 10; ++step) {
        fixture.trainer.set_hyperparameters(step, {kDecoupled, kDecoupled});
        fixture.trainer.write_word(step, 1.0f);
        const auto weight = static_cast<float>(step);
        std::fill(arena.master() + block.begin, arena.master() + block.end, weight);
        std::fill(published, published + (block.end - block.begin), 0.0f);
        fixture.run(job_of(2, step, step, 1), {0});
        // The gradient is zero: only decay acts.
        for (const uint64_t i : {block.begin, block.end - 1}) {
            CHECK(arena.master()[i] < weight && arena.master()[i] > 0.999f * weight);
            CHECK_EQ(published[i - block.begin], arena.master()[i]);
        }
    }
}

TEST(block_replay, rejects_invalid_jobs) {
    const Fixture fixture{ArenaSpec{}};
    const auto error = [&fixture](const UpdateJob& job) {
        const uint32_t slots[] = {5, 6};
        return error_of([&] { fixture.replay.check(job, slots); });
    };
    CHECK_CONTAINS(error(job_of(2, 1, 1, 1)), "block must be below n_blocks = 2, got 2");
    CHECK_CONTAINS(error(job_of(1, 1, 1, 1, 2)), "publish_buffer must be below n_publish_buffers = 2, got 2");
    CHECK_CONTAINS(error(job_of(1, 1, 1, 2)), "slots[1] must be below n_slots = 6, got 6");
    CHECK_CONTAINS(error(tentative(job_of(1, 1, 1, 2))), "slots[1] must be below n_slots = 6, got 6");
    UpdateJob unclear = job_of(1, 1, 1, 1);
    unclear.tentative = static_cast<Tentative>(4);
    CHECK_CONTAINS(error(unclear), "tentative must be 0 (none), 1 (predicted), 2 (true if known) or 3 (true), got 4");
    CHECK_CONTAINS(error(tentative(job_of(1, 1, 1, 2), Tentative::kCorrection)),
                   "n_committed must be 0 with tentative = 3 (true), got 1");
}

}  // namespace
}  // namespace zenflow
