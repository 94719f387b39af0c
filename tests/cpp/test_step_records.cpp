#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "arena.h"
#include "check.h"
#include "step_records.h"
#include "trainer_arena.h"

namespace zenflow {
namespace {

using std::chrono::milliseconds;
using test::ArenaSpec;
using test::error_of;
using test::TrainerArena;

constexpr milliseconds kLong{600000};
constexpr milliseconds kShort{20};

bool never() { return false; }

// A ring of four records.
struct Ring {
    TrainerArena trainer{ArenaSpec{}};
    Arena arena{trainer.fd()};
    StepRecords records{arena, kLong};
    StepRecords impatient_records{arena, kShort};
};

TEST(step_records, counts_applied_steps) {
    Ring ring;
    ring.trainer.write_word(1, 1.0f);
    ring.trainer.write_word(2, std::nanf(""));
    ring.trainer.write_word(3, 0.5f);
    CHECK(ring.records.resolve(3, never));
    CHECK_EQ(ring.records.step(1).count, 1);
    CHECK(ring.records.step(1).applied);
    CHECK_EQ(ring.records.step(2).count, 1);
    CHECK(!ring.records.step(2).applied);
    CHECK_EQ(ring.records.step(3).count, 2);
    CHECK_EQ(ring.records.step(3).clip, 0.5f);
    CHECK_EQ(ring.trainer.header().resolved_step, 3);
    CHECK_EQ(ring.trainer.record(3).count, 2);
}

TEST(step_records, goes_on_from_where_the_header_says) {
    Ring ring;
    ring.trainer.header().resolved_step = 100;
    ring.trainer.record(100).count = 90;
    ring.trainer.write_word(101, 1.0f);
    CHECK(ring.records.resolve(101, never));
    CHECK_EQ(ring.records.step(101).count, 91);
    // Another block's round of the same step waits for nothing and counts nothing.
    CHECK(ring.records.resolve(101, never));
    CHECK(ring.records.resolve(50, never));
    CHECK_EQ(ring.trainer.record(101).count, 91);
}

TEST(step_records, ring_goes_round) {
    Ring ring;
    for (int64_t step = 1; step <= 13; ++step) {
        ring.trainer.write_word(step, 1.0f);
        ring.records.check(step, 1);
        CHECK(ring.records.resolve(step, never));
        CHECK_EQ(ring.records.step(step).count, step);
    }
}

// The device writes through the worker's own mapping here, so that ThreadSanitizer sees one address where the hardware does.
TEST(step_records, waits_for_a_late_word_and_sees_what_came_before_it) {
    Ring ring;
    std::atomic<bool> waiting{false};
    std::thread device([&] {
        while (!waiting) std::this_thread::yield();
        for (int64_t step = 1; step <= 2; ++step) {
            ring.arena.master()[step] = static_cast<float>(step);
            StepWord& word = ring.arena.step_record(step).word;
            word.clip = 0.5f;
            __atomic_store_n(&word.sequence, step, __ATOMIC_RELEASE);
        }
    });
    CHECK(ring.records.resolve(2, [&waiting] {
        waiting = true;
        return false;
    }));
    CHECK_EQ(ring.arena.master()[1], 1.0f);
    CHECK_EQ(ring.arena.master()[2], 2.0f);
    CHECK_EQ(ring.records.step(2).clip, 0.5f);
    device.join();
}

TEST(step_records, an_early_step_follows_on_the_one_before_and_waits_for_its_own_blocks_word) {
    Ring ring;
    ring.trainer.write_word(1, 1.0f);
    ring.trainer.write_word(2, std::nanf(""));
    ring.trainer.write_block_word(0, 3, 0.25f);
    CHECK(ring.records.resolve_early(3, 0, never));
    const StepRecords::Step step = ring.records.early_step(3, 0);
    CHECK(step.applied);
    CHECK_EQ(step.clip, 0.25f);
    CHECK_EQ(step.count, 2);
    // The step itself is not resolved by that.
    CHECK_EQ(ring.trainer.header().resolved_step, 2);
    ring.trainer.write_word(3, std::nanf(""));
    CHECK(ring.records.resolve(3, never));
    CHECK_EQ(ring.records.step(3).count, 1);
    // Once more, as after a restart: the same.
    CHECK(ring.records.resolve_early(3, 0, never));
    CHECK_EQ(ring.records.early_step(3, 0).count, 2);
}

TEST(step_records, an_early_step_is_not_applied_where_its_block_is_not_finite) {
    Ring ring;
    ring.trainer.write_block_word(0, 1, std::nanf(""));
    CHECK(ring.records.resolve_early(1, 0, never));
    CHECK(!ring.records.early_step(1, 0).applied);
}

TEST(step_records, an_early_step_without_its_blocks_word_does_not_arrive) {
    Ring ring;
    ring.trainer.write_word(1, 1.0f);
    ring.trainer.write_word(2, 1.0f);
    ring.trainer.write_block_word(0, 1, 1.0f);
    CHECK_CONTAINS(error_of([&ring] { ring.impatient_records.resolve_early(2, 0, never); }),
                   "step 2's clip coefficient did not arrive within 20 ms");
    ring.trainer.write_block_word(0, 3, 1.0f);
    CHECK_CONTAINS(error_of([&ring] { ring.impatient_records.resolve_early(2, 0, never); }), "already holds step 3");
}

TEST(step_records, ends_the_wait_when_the_trainer_is_gone) {
    Ring ring;
    int n_asked = 0;
    CHECK(!ring.records.resolve(1, [&n_asked] { return ++n_asked == 3; }));
    CHECK_EQ(ring.trainer.header().resolved_step, 0);
}

TEST(step_records, names_the_step_whose_word_does_not_arrive) {
    Ring ring;
    ring.trainer.write_word(1, 1.0f);
    CHECK_CONTAINS(error_of([&ring] { ring.impatient_records.resolve(2, never); }),
                   "step 2's clip coefficient did not arrive within 20 ms");
    CHECK_EQ(ring.trainer.header().resolved_step, 1);
}

TEST(step_records, refuses_a_record_that_a_later_step_has_taken) {
    Ring ring;
    ring.trainer.write_word(5, 1.0f);
    CHECK_CONTAINS(error_of([&ring] { ring.records.resolve(1, never); }), "already holds step 5");
    ring.trainer.header().resolved_step = 5;
    CHECK_CONTAINS(error_of([&ring] { ring.records.step(1); }), "now holds step 5");
}

TEST(step_records, refuses_steps_that_cannot_be) {
    Ring ring;
    ring.records.check(-5, 0);  // publishes only, its step means nothing
    ring.records.check(1, 4);
    CHECK_CONTAINS(error_of([&ring] { ring.records.check(0, 1); }), "first_step is 0");
    CHECK_CONTAINS(error_of([&ring] { ring.records.check(-1, 1); }), "first_step is -1");
    CHECK_CONTAINS(error_of([&ring] { ring.records.check(std::numeric_limits<int64_t>::max(), 2); }), "first_step");
    CHECK_CONTAINS(error_of([&ring] { ring.records.check(1, 5); }), "n_steps is 5, allowed are up to n_step_records = 4");
    CHECK_CONTAINS(error_of([&ring] { ring.records.check(2, 4); }), "last step is 5");
    ring.trainer.header().resolved_step = 1;
    ring.records.check(2, 4);
}

}  // namespace
}  // namespace zenflow
