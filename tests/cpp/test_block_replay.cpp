// The computation of an update job: how a block is divided among ranges, segments and threads.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
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
using test::tentative;
using test::TrainerArena;

constexpr int kThreads = 3;

// An arena with the worker's objects on it.
struct Fixture {
    TrainerArena trainer;
    StepRecords records{trainer};
    BlockReplay replay{trainer, records};
    TrainerArena expected;

    explicit Fixture(const ArenaSpec& spec) : trainer(spec), expected(spec) { omp_set_num_threads(kThreads); }

    void run(const UpdateJob& job, const std::vector<uint32_t>& slots) {
        replay.check(job, slots.data());
        CHECK(records.resolve(job));
        replay.run(job, slots.data());
    }
    // Runs a job that applies these of its steps, which must change all that it should, and nothing else.
    void check(const UpdateJob& job, const std::vector<TrainerArena::Applied>& applied, bool shows_tentative) {
        std::vector<uint32_t> slots;
        for (uint64_t i = 0; i < n_steps_of(job); ++i) slots.push_back(slot_of(job.first_step + static_cast<int64_t>(i)));
        expected.copy(trainer);
        expected.replay(job.block, job.publish_buffer, applied, job.first_step + job.n_committed - 1, shows_tentative);
        run(job, slots);
        CHECK(trainer.equals(expected));
    }
    static uint32_t slot_of(int64_t step) { return static_cast<uint32_t>(step % 4); }
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
// later, then a flush. Steps without a finite factor: predicted (3), both (2).
void check_one_behind(DataType type, DataType moments) {
    ArenaSpec spec = awkward_spec(type);
    spec.moments_dtype = moments;
    Fixture fixture(spec);
    TrainerArena& trainer = fixture.trainer;
    trainer.set_random_state(3);
    const float nan = std::nanf("");
    const float clips[] = {0.5f, nan, 0.25f}, predictions[] = {0.75f, nan, nan};
    const int64_t counts[] = {1, 1, 2}, counts_shown[] = {1, 2, 2};
    int64_t job_id = 0;
    for (int64_t step = 1; step <= 4; ++step) {
        if (step <= 3) {
            trainer.set_gradient(Fixture::slot_of(step), static_cast<uint32_t>(step));
            trainer.hyperparameters(step, 0, true) = kDecoupled;
            trainer.hyperparameters(step, 1, true) = test::kGradientDecay;
        }
        const auto applied = [&](int64_t s, bool is_predicted) {
            const float factor = (is_predicted ? predictions : clips)[s - 1];
            const int64_t count = (is_predicted ? counts_shown : counts)[s - 1];
            const TrainerArena::Applied result{Fixture::slot_of(s), s, count, factor, is_predicted};
            return std::isnan(factor) ? std::vector<TrainerArena::Applied>() : std::vector{result};
        };
        for (uint32_t b = 0; b < spec.blocks.size(); ++b) {
            UpdateJob job = job_of(b, ++job_id, step > 1 ? step - 1 : step, (step > 1 ? 1 : 0) + (step <= 3 ? 1 : 0), 1);
            std::vector<TrainerArena::Applied> steps, shown;
            if (step > 1) steps = applied(step - 1, false);
            if (step <= 3) {
                trainer.write_block_word(b, step, predictions[step - 1]);
                job = tentative(job);
                shown = applied(step, true);
                steps.insert(steps.end(), shown.begin(), shown.end());
            }
            fixture.check(job, steps, !shown.empty());
            // Three elements are one thread's share, 50,000 suffice for all.
            CHECK(b != 1 || trainer.live().n_shares == 1);
            CHECK(b != 2 || trainer.live().n_shares == kThreads);
        }
        // The end of the step: its factor and a hook's learning rate.
        if (step > 3) break;
        trainer.hyperparameters(step, 0) = trainer.hyperparameters(step, 1) = kDecoupled;
        trainer.hyperparameters(step, 1).lr = 2e-3;
        trainer.write_word(step, clips[step - 1]);
        // The weights once more, with what is true; in step 2 there is nothing to do.
        for (uint32_t b = 0; b < spec.blocks.size() && step != 2; ++b) {
            fixture.check(tentative(job_of(b, ++job_id, step, 1, 1), Tentative::kCorrection), applied(step, false), true);
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
        Fixture fixture{ArenaSpec()};
        TrainerArena& trainer = fixture.trainer;
        trainer.set_random_state(3);
        trainer.set_gradient(1, 6);
        trainer.set_hyperparameters(1, kDecoupled, kDecoupled);
        trainer.hyperparameters(1, 0).lr = c.lr;
        trainer.write_block_word(0, 1, c.predicted);
        if (c.arrived) trainer.write_word(1, c.clip);
        fixture.run(tentative(job_of(0, 1, 1, 1), c.kind), {1});
        trainer.write_word(1, c.clip);
        // A change that only a new publication would undo.
        fixture.expected.copy(trainer);
        trainer.publish_buffer(0)[0] ^= std::byte{1};
        const std::byte changed = trainer.publish_buffer(0)[0];
        fixture.run(tentative(job_of(0, 2, 1, 1), Tentative::kCorrection), {1});
        CHECK_EQ(trainer.publish_buffer(0)[0] != changed, c.expected);
        CHECK_EQ(trainer.completed_job_of(0), 2);
        std::vector<TrainerArena::Applied> applied;
        if (!std::isnan(c.clip)) applied.push_back({1, 1, 1, c.clip});
        fixture.expected.set_hyperparameters(1, kDecoupled, kDecoupled);
        fixture.expected.hyperparameters(1, 0).lr = c.lr;
        fixture.expected.replay(0, 0, applied, 0, !applied.empty());
        if (!c.expected) trainer.publish_buffer(0)[0] ^= std::byte{1};
        CHECK(trainer.equals(fixture.expected));
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
        trainer.set_random_state(3);
        trainer.step_record(0).count = 5;
        for (const int64_t step : {1, 2}) {
            trainer.set_hyperparameters(step, kDecoupled, test::kGradientDecay);
            trainer.set_gradient(Fixture::slot_of(step), static_cast<uint32_t>(step));
        }
        trainer.write_word(1, 0.5f);
        for (const uint32_t b : {0u, 1u}) {
            trainer.write_block_word(b, 2, 0.25f);
            const TrainerArena::Applied first{1, 1, 6, 0.5f}, second{2, 2, 7, 0.25f, true};
            fixture.check(tentative(job_of(b, b + 1, 1, 2)), {first, second}, true);
        }
    }
}

TEST(block_replay, rejects_ranges_that_have_missed_all_steps) {
    ArenaSpec spec;
    spec.ranges[0].n_missed = 1;
    Fixture fixture(spec);
    fixture.trainer.set_hyperparameters(1, kDecoupled, kDecoupled);
    fixture.trainer.write_word(1, 1.0f);
    CHECK_CONTAINS(error_of([&] { fixture.run(job_of(0, 1, 1, 1), {0}); }), "a range has missed all steps");
    CHECK_EQ(fixture.replay.journal().job_in_progress(), 0);
}

// The caller's writes before a job and its reads after it are ordered with the threads' work. Everything uses one mapping, so
// that ThreadSanitizer detects races.
TEST(block_replay, successive_jobs_do_not_race) {
    const ArenaSpec spec = awkward_spec(DataType::kFloat32);
    Fixture fixture(spec);
    const TrainerArena& arena = fixture.trainer;
    const Block block = spec.blocks[2];
    auto* const published = reinterpret_cast<float*>(arena.publish_buffer(0));
    for (int64_t step = 1; step <= 10; ++step) {
        fixture.trainer.set_hyperparameters(step, kDecoupled, kDecoupled);
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

}  // namespace
}  // namespace zenflow
