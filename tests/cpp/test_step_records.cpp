#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "check.h"
#include "trainer_arena.h"
#include "worker/arena.h"
#include "worker/step_records.h"

namespace zenflow {
namespace {

using test::error_of;
using test::job_of;
using test::tentative;
using test::TrainerArena;

UpdateJob of_step(int64_t step) { return job_of(0, 1, step, 1); }

// A ring of four records.
struct Ring {
    TrainerArena trainer;
    StepRecords records{trainer};

    bool resolve(const UpdateJob& job) const { return records.resolve(job); }
    StepRecords::Step step(const UpdateJob& job) const {
        return job.tentative != Tentative::kNone ? records.tentative_step(job, records.to_show(job))
                                                 : records.committed_step(job, 0);
    }
    std::string error(const UpdateJob& job) const {
        return error_of([&] { records.resolve(job); });
    }
    // Whether the word of a step, or of a block unless it is kNoBlock, is missing; a look at it is noted.
    bool lacks(const UpdateJob& job, int64_t step, uint32_t block) {
        const ArenaHeader& header = trainer.live();
        const uint64_t n_looks = header.n_looks;
        return !resolve(job) && header.awaited_step == step && header.awaited_block == block && header.n_looks == n_looks + 1;
    }
};

TEST(step_records, counts_applied_steps) {
    Ring ring;
    ring.trainer.write_word(1, 1.0f);
    ring.trainer.write_word(2, std::numeric_limits<float>::infinity());
    ring.trainer.write_word(3, 0.5f);
    CHECK(ring.resolve(job_of(0, 1, 1, 3)));
    CHECK_EQ(ring.step(of_step(1)).count, 1);
    CHECK_EQ(ring.step(of_step(1)).clip, 1.0f);
    CHECK_EQ(ring.step(of_step(2)).count, 1);
    CHECK(!std::isfinite(ring.step(of_step(2)).clip));
    CHECK_EQ(ring.step(of_step(3)).count, 2);
    CHECK_EQ(ring.records.committed_step(job_of(0, 1, 1, 3), 2).clip, 0.5f);
    CHECK_EQ(ring.trainer.live().resolved_step, 3);
    CHECK_EQ(ring.trainer.step_record(3).count, 2);
}

TEST(step_records, continues_from_the_headers_step) {
    Ring ring;
    ring.trainer.live().resolved_step = 100;
    ring.trainer.step_record(100).count = 90;
    ring.trainer.write_word(101, 1.0f);
    CHECK(ring.resolve(of_step(101)));
    CHECK_EQ(ring.step(of_step(101)).count, 91);
    // Another block's job with the same step neither waits nor counts.
    CHECK(ring.resolve(of_step(101)));
    CHECK(ring.resolve(of_step(50)));
    CHECK_EQ(ring.trainer.step_record(101).count, 91);
    // The ring wraps around.
    for (int64_t step = 102; step <= 113; ++step) {
        ring.trainer.write_word(step, 1.0f);
        ring.records.check(of_step(step));
        CHECK(ring.resolve(of_step(step)));
        CHECK_EQ(ring.step(of_step(step)).count, step - 10);
    }
}

// The device writes through the worker's own mapping, so that ThreadSanitizer sees the same addresses.
TEST(step_records, waits_for_a_late_word_and_acquires_earlier_writes) {
    Ring ring;
    std::atomic<bool> waiting{false};
    std::thread device([&] {
        while (!waiting) std::this_thread::yield();
        for (int64_t step = 1; step <= 2; ++step) {
            ring.trainer.master()[step] = static_cast<float>(step);
            StepWord& word = ring.trainer.step_record(step).word;
            word.clip = 0.5f;
            word.check = check_of(0.5f, step);
            __atomic_store_n(&word.sequence, step, __ATOMIC_RELEASE);
        }
    });
    while (!ring.resolve(of_step(2))) waiting = true;
    CHECK_EQ(ring.trainer.master()[1], 1.0f);
    CHECK_EQ(ring.trainer.master()[2], 2.0f);
    CHECK_EQ(ring.step(of_step(2)).clip, 0.5f);
    device.join();
}

// The record held step 1 before. Of the word of step 5, each part is the last to arrive once.
TEST(step_records, waits_for_all_parts_of_a_word) {
    for (const float clip : {0.5f, 0.0f, std::nanf("")}) {
        for (int last = 0; last < 3; ++last) {
            Ring ring;
            ring.trainer.live().resolved_step = 4;
            ring.trainer.write_word(1, 1.0f);
            StepWord& word = ring.trainer.step_record(5).word;
            const StepWord whole{clip, check_of(clip, 5), 5};
            if (last != 0) word.clip = whole.clip;
            if (last != 1) word.check = whole.check;
            if (last != 2) word.sequence = whole.sequence;
            CHECK(ring.lacks(of_step(5), 5, kNoBlock));
            CHECK_EQ(ring.trainer.live().resolved_step, 4);
            word = whole;
            CHECK(ring.resolve(of_step(5)));
            CHECK_EQ(std::isfinite(ring.step(of_step(5)).clip), std::isfinite(clip));
        }
    }
}

TEST(step_records, a_tentative_step_waits_for_its_blocks_word_after_the_step_before) {
    for (const UpdateJob& job : {tentative(of_step(3)), tentative(job_of(0, 1, 1, 3))}) {
        Ring ring;
        ring.trainer.write_word(1, 1.0f);
        ring.trainer.write_word(2, std::nanf(""));
        ring.trainer.write_block_word(0, 3, 0.25f);
        CHECK(ring.resolve(job));
        CHECK_EQ(ring.step(job).clip, 0.25f);
        CHECK_EQ(ring.step(job).count, 2);
        // The step itself remains unresolved.
        CHECK_EQ(ring.trainer.live().resolved_step, 2);
        ring.trainer.write_word(3, std::nanf(""));
        CHECK(ring.resolve(of_step(3)));
        CHECK_EQ(ring.step(of_step(3)).count, 1);
        // Repeated, as after a restart.
        CHECK(ring.resolve(job));
        CHECK_EQ(ring.step(job).count, 2);
    }
}

TEST(step_records, rejects_a_record_that_a_later_step_has_overwritten) {
    Ring ring;
    ring.trainer.write_word(5, 1.0f);
    ring.trainer.write_block_word(0, 3, 1.0f);
    CHECK_CONTAINS(ring.error(of_step(1)), "sequence <= step");
    CHECK_CONTAINS(ring.error(tentative(of_step(1))), "sequence <= step");
    ring.trainer.live().resolved_step = 5;
    CHECK_CONTAINS(error_of([&ring] { ring.step(of_step(1)); }), "sequence_of(record.word) == step");
    // A step's word does not replace the block's.
    ring.trainer.write_word(6, 1.0f);
    CHECK(ring.lacks(tentative(of_step(6)), 6, 0));
}

}  // namespace
}  // namespace zenflow
