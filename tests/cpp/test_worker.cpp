// The worker process from start to exit and its errors, seen from the trainer. A hang is a failure: the test runner has a
// timeout.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adamw/tile_journal.h"
#include "check.h"
#include "trainer_arena.h"
#include "worker_process.h"

namespace zenflow {
namespace {

using test::ArenaSpec;
using test::first_core;
using test::job_of;
using test::tentative;
using test::TrainerArena;
using test::WorkerProcess;

// Several jobs over two blocks and two parameter groups, with padding between them. Of a second worker on the same memory: see
// test_kill.cpp.
void train(DataType type) {
    ArenaSpec spec;
    spec.ranges = {{0, 30000, 0, 0, 0}, {30016, 50001, 1, 0, 0}};
    spec.blocks = {{0, 33000}, {33000, 50048}};
    spec.numel = 50048;
    spec.n_slots = 8;
    spec.n_publish_buffers = 3;
    spec.model_dtype = type;
    TrainerArena arena(spec), expected(spec);
    arena.set_random_state(5);
    expected.copy(arena);
    const float clips[] = {0.5f, 1.0f, std::nanf(""), 0.25f};
    const int64_t counts[] = {1, 2, 2, 3};
    const auto slot = [](int64_t step, uint32_t b) { return static_cast<uint32_t>(step) % 4 * 2 + b; };
    // Everything of a step except its word.
    const auto prepare = [&](int64_t step) {
        for (TrainerArena* each : {&arena, &expected}) {
            each->set_hyperparameters(step, test::kDecoupled, test::kGradientDecay);
            each->hyperparameters(step, 0).lr /= static_cast<double>(step);
            for (uint32_t b = 0; b < 2; ++b) each->set_gradient(slot(step, b), static_cast<uint32_t>(step) * 2 + b);
        }
    };
    const auto arrive = [&](int64_t step) { arena.write_word(step, clips[step - 1]); };

    const std::string cores = test::all_cores();
    WorkerProcess worker(arena, cores);
    const Ready ready = worker.receive_ready();
    CHECK_EQ(ready.version, kVersion);
    CHECK_EQ(ready.n_threads, 1 + static_cast<uint32_t>(std::count(cores.begin(), cores.end(), ',')));
    std::vector<UpdateJob> submitted;
    const auto submit = [&](const UpdateJob& job) {
        std::vector<uint32_t> slots;
        for (uint32_t i = 0; i < job.n_committed; ++i) slots.push_back(slot(job.first_step + i, job.block));
        submitted.push_back(job);
        worker.submit(job, slots);
    };
    // Receives the answers, in order of submission, and applies the jobs to the expected state.
    const auto check_answers = [&] {
        for (const UpdateJob& job : submitted) {
            const Done done = worker.receive_done();
            CHECK_EQ(done.block, job.block);
            CHECK_EQ(done.job_id, job.job_id);
            CHECK(done.busy_ns >= 0);  // a repeated job takes no time
            std::vector<TrainerArena::Applied> applied;
            for (int64_t step = job.first_step; step < job.first_step + job.n_committed; ++step) {
                const float clip = clips[step - 1];
                if (!std::isnan(clip)) applied.push_back({slot(step, job.block), step, counts[step - 1], clip});
            }
            expected.replay(job.block, job.publish_buffer, applied, 0);
        }
        submitted.clear();
        CHECK(arena.equals(expected));
    };

    // Without steps a job only publishes.
    submit(job_of(0, 1, 0, 0, 2));
    check_answers();

    // A window of two steps is submitted before its data arrives. The other block's job finds the steps resolved.
    prepare(1);
    arrive(1);
    submit(job_of(0, 2, 1, 2, 0));
    submit(job_of(1, 3, 1, 2, 1));
    prepare(2);
    arrive(2);
    check_answers();
    CHECK_EQ(arena.live().resolved_step, 2);
    CHECK_EQ(arena.step_record(2).count, 2);

    // A step whose gradient is not finite is skipped. Jobs submitted before the exit message are completed.
    for (const int64_t step : {3, 4}) prepare(step), arrive(step);
    submit(job_of(0, 4, 3, 2, 2));
    submit(job_of(1, 5, 3, 1, 0));
    submit(job_of(1, 6, 4, 1, 1));
    worker.send(MessageHeader{static_cast<uint32_t>(MessageType::kExit), 0});
    check_answers();
    CHECK_EQ(worker.wait(), 0);
    CHECK_EQ(arena.live().resolved_step, 4);
    CHECK_EQ(arena.step_record(4).count, 3);
}

TEST(worker, replays_jobs) {
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) train(type);
}

// Jobs of one block in order, and a request behind all jobs before it; beyond that the block with the newest job whose first
// one's word has arrived.
TEST(worker, takes_the_newest_job_first) {
    ArenaSpec spec;
    spec.numel = 192;
    spec.ranges = {{0, 192, 0, 0, 0}};
    spec.blocks = {{0, 64}, {64, 128}, {128, 192}};
    spec.n_slots = 6;
    TrainerArena arena(spec);
    arena.live().newest_first = 1;
    WorkerProcess worker(arena, first_core());
    worker.receive_ready();
    arena.write_word(1, 1.0f);
    arena.write_block_word(1, 2, 1.0f);
    // Block 0's second job makes its first one newer than block 1's.
    const UpdateJob jobs[] = {job_of(0, 1, 1, 1), tentative(job_of(1, 2, 1, 2)), job_of(0, 3, 1, 0),
                              tentative(job_of(2, 4, 1, 2))};
    worker.signal(SIGSTOP);
    for (const UpdateJob& job : jobs)
        worker.submit(job, job.block == 0 ? std::vector<uint32_t>(job.n_committed) : std::vector<uint32_t>{1, 2});
    worker.send(Touch{static_cast<uint32_t>(MessageType::kTouch), 0, 1, arena.header().slots_offset, 1, 1});
    worker.submit(job_of(0, 5, 1, 0), {});
    worker.signal(SIGCONT);
    for (const int64_t job_id : {1, 3, 2}) CHECK_EQ(worker.receive_done().job_id, job_id);
    arena.write_block_word(2, 2, 1.0f);
    CHECK_EQ(worker.receive_done().job_id, 4);
    CHECK_EQ(worker.receive_acknowledged().request_id, 1);
    CHECK_EQ(worker.receive_done().job_id, 5);
}

// Until the worker waits for the word of a step or, unless it is kNoBlock, of a block, and looks again.
void wait_for_looks(TrainerArena& arena, int64_t step, uint32_t block) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    const auto wait = [deadline](const auto& condition) {
        while (!condition()) {
            CHECK(std::chrono::steady_clock::now() < deadline);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    };
    const ArenaHeader& header = arena.live();
    wait([&] { return header.awaited_step == step && header.awaited_block == block; });
    const uint64_t n_looks = header.n_looks;
    wait([&] { return header.n_looks > n_looks || header.awaited_step == 0; });
}

// One that was idle for longer than words may take waits for the next job's word nevertheless, also where another message has
// been carried out between.
TEST(worker, waits_for_words_after_an_idle_time) {
    TrainerArena arena;
    arena.live().newest_first = 1;
    WorkerProcess worker(arena, first_core(), 900);
    worker.receive_ready();
    for (int64_t step = 1; step <= 2; ++step) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1000));
        worker.submit(tentative(job_of(0, step, step, 1)), {0});
        wait_for_looks(arena, step, 0);
        arena.write_block_word(0, step, 1.0f);
        arena.write_word(step, 1.0f);
        CHECK_EQ(worker.receive_done().job_id, step);
    }
}

TEST(worker, says_which_word_it_waits_for) {
    for (const uint32_t newest_first : {0, 1}) {
        TrainerArena arena;
        arena.live().newest_first = newest_first;
        arena.live().awaited_step = 7;  // of a killed worker
        WorkerProcess worker(arena, first_core());
        worker.receive_ready();
        CHECK_EQ(arena.live().awaited_step, 0);
        worker.submit(tentative(job_of(1, 1, 1, 2)), {0, 1});
        wait_for_looks(arena, 1, kNoBlock);
        arena.write_word(1, 1.0f);
        wait_for_looks(arena, 2, 1);
        arena.write_block_word(1, 2, 1.0f);
        worker.receive_done();
        CHECK_EQ(arena.live().awaited_step, 0);
        const uint64_t n_looks = arena.live().n_looks;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        CHECK_EQ(arena.live().n_looks, n_looks);
    }
}

// The trainer resubmits jobs in their order. What has not been begun waits for the one that has, also before that one is there.
TEST(worker, continues_the_interrupted_job_before_newer_ones) {
    TrainerArena arena;
    arena.live().newest_first = 1;
    arena.live().begun_job = 5;
    arena.live().completed_job = 4;
    arena.live().n_shares = 1;
    arena.journal_entry(0).begin = arena.journal_entry(0).position = 64;
    arena.journal_entry(0).end = 100;
    arena.journal_entry(0).saved_at = kNothingSaved;
    WorkerProcess worker(arena, first_core(), 10000);
    worker.receive_ready();
    worker.submit(job_of(0, 3, 1, 0), {});
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK_EQ(worker.bytes_waiting(), 0u);
    for (const auto& [block, job_id] : {std::pair{1u, 5}, {0u, 6}, {1u, 7}}) worker.submit(job_of(block, job_id, 1, 0), {});
    CHECK_EQ(worker.receive_done().job_id, 5);
    for (int64_t previous = 0, i = 0; i < 3; ++i) {
        const Done done = worker.receive_done();
        CHECK(done.block == 1 || done.job_id > previous);
        if (done.block == 0) previous = done.job_id;
    }
}

// While it starts, while it is idle, and while it waits for the second job's word, which never arrives.
TEST(worker, exits_when_the_trainer_dies) {
    for (int when = 0; when < 3; ++when) {
        TrainerArena arena;
        WorkerProcess worker(arena, first_core());
        if (when > 0) worker.receive_ready();
        if (when == 2) {
            arena.write_word(1, 1.0f);
            worker.submit(job_of(0, 1, 1, 1, 0), {0});
            worker.submit(job_of(0, 2, 2, 1, 0), {0});
            worker.submit(job_of(1, 3, 2, 1, 1), {1});
            worker.receive_done();
        }
        worker.close_socket();
        CHECK_EQ(worker.wait(), 0);
        CHECK_EQ(arena.live().resolved_step, when == 2 ? 1 : 0);
    }
}

TEST(worker, ignores_signals_of_the_terminal) {
    const TrainerArena arena;
    WorkerProcess worker(arena, first_core());
    worker.receive_ready();
    worker.signal(SIGINT);
    worker.signal(SIGHUP);
    worker.submit(job_of(0, 1, 0, 0, 0), {});
    worker.receive_done();
    worker.signal(SIGTERM);
    CHECK_EQ(worker.wait(), -SIGTERM);
}

}  // namespace
}  // namespace zenflow
