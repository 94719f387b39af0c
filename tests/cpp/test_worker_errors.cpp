// Errors of the worker process. A hang is a failure: the test runner has a timeout.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"
#include "trainer_arena.h"
#include "worker_process.h"

namespace zenflow {
namespace {

using test::first_core;
using test::job_of;
using test::output_of_worker;

using test::tentative;
using test::TrainerArena;
using test::WorkerProcess;

// The error of a worker on `arena` after `send`; the worker then exits with status 1.
template <typename Send>
std::string error_after(const TrainerArena& arena, const Send& send, const std::vector<std::string>& arguments = {}) {
    WorkerProcess worker(arena, first_core(), arguments);
    worker.receive_ready();
    send(worker);
    const std::string error = worker.receive_error();
    CHECK_EQ(worker.wait(), 1);
    return error;
}

// The same, where the worker does not become ready.
std::string error_at_start(const TrainerArena& arena, const std::string& cores) {
    WorkerProcess worker(arena, cores);
    const std::string error = worker.receive_error();
    CHECK_EQ(worker.wait(), 1);
    return error;
}

TEST(worker, rejects_a_job_out_of_order) {
    TrainerArena arena;
    arena.header().begun_job = 5;
    arena.header().completed_job = 4;
    const std::string error = error_after(arena, [](WorkerProcess& worker) {
        worker.submit(job_of(0, 4, 0, 0), {});
        CHECK_EQ(worker.receive_done().job_id, 4);
        worker.submit(job_of(0, 6, 0, 0), {});
    });
    CHECK_CONTAINS(error, "job_id must be 5, the job in progress, got 6");
}

TEST(worker, rejects_a_journal_that_does_not_fit_the_job) {
    TrainerArena arena;
    arena.header().begun_job = 1;
    arena.header().n_shares = 1;
    arena.journal_entry(0).end = 65;
    const std::string error = error_after(arena, [](WorkerProcess& worker) { worker.submit(job_of(0, 1, 0, 0), {}); });
    CHECK_CONTAINS(error,
                   "journal: entry 0 must have ascending bounds from 0 to the end of block 0, 64, got position 0 in [0, 65)");
}

TEST(worker, reports_a_word_that_does_not_arrive) {
    const std::string error = error_after(
        TrainerArena(), [](WorkerProcess& worker) { worker.submit(job_of(0, 1, 1, 2), {0, 1}); }, {"--word-timeout-ms", "30"});
    CHECK_EQ(error, "step 1's clip coefficient did not arrive within 30 ms");
}

TEST(worker, reports_an_invalid_job) {
    struct Case {
        UpdateJob job;
        std::vector<uint32_t> slots;
        const char* error;
    };
    const Case cases[] = {
        {job_of(2, 1, 1, 0), {}, "block must be below n_blocks = 2, got 2"},
        {job_of(0, 1, 0, 1), {0}, "first_step must be at least 1"},
        {job_of(0, 1, 1, 5), {0, 0, 0, 0, 0}, "n_committed + has_tentative must be at most n_step_records = 4, got 5"},
        {job_of(0, 1, 4, 2), {0, 0}, "last step must be at most 4"},
        {job_of(0, 1, 1, 2), {0}, "must have 48 bytes with n_committed = 2 and has_tentative = 0, got 44"},
        {job_of(0, 1, 1, 1), {0, 0}, "must have 44 bytes with n_committed = 1 and has_tentative = 0, got 48"},
        {tentative(job_of(0, 1, 1, 1)), {0, 0}, "must have 44 bytes with n_committed = 0 and has_tentative = 1, got 48"},
        {job_of(0, 1, 1, 0xffffffffu), {0, 0}, "with n_committed = 4294967295 and has_tentative = 0, got 48"},
    };
    for (const Case& c : cases) {
        CHECK_CONTAINS(error_after(TrainerArena(), [&c](WorkerProcess& worker) { worker.submit(c.job, c.slots); }), c.error);
    }
}

TEST(worker, reports_an_unknown_message) {
    const std::string error = error_after(TrainerArena(), [](WorkerProcess& worker) {
        const MessageHeader message{77, 0};
        worker.send(&message, sizeof(message));
    });
    CHECK_CONTAINS(error, "type must be 1 (job), 2 (exit), 6 (export) or 7 (touch), got 77");
}

TEST(worker, reports_an_error_with_a_closed_standard_error) {
    int ends[2];
    CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
    close(ends[0]);
    const TrainerArena arena;
    WorkerProcess worker(arena, first_core(), {}, ends[1]);
    close(ends[1]);
    worker.receive_ready();
    worker.submit(job_of(2, 1, 1, 0), {});
    CHECK_CONTAINS(worker.receive_error(), "block must be below n_blocks = 2, got 2");
    CHECK_EQ(worker.wait(), 1);
}

TEST(worker, reports_an_invalid_arena_and_unusable_cores) {
    TrainerArena arena;
    CHECK_CONTAINS(error_at_start(arena, "8000"), ", got 8000");
    arena.header().n_step_records = 0;
    CHECK_CONTAINS(error_at_start(arena, first_core()), "n_step_records must be at least 2, got 0");
}

TEST(worker, reports_an_environment_that_limits_the_threads) {
    const std::string cores = test::all_cores();
    if (cores.find(',') == std::string::npos) return;  // the limit has no effect with one core
    setenv("OMP_THREAD_LIMIT", "1", 1);
    const std::string error = error_at_start(TrainerArena(), cores);
    unsetenv("OMP_THREAD_LIMIT");
    CHECK_CONTAINS(error, "OMP_THREAD_LIMIT");
}

TEST(worker, explains_wrong_arguments) {
    struct Case {
        std::vector<std::string> arguments;
        const char* output;
    };
    const Case cases[] = {
        {{}, "usage: zenflow-worker"},
        {{"--arena-fd", "3", "--socket-fd", "4"}, "--cores is missing"},
        {{"--arena-fd", "3", "--cores", "0"}, "--socket-fd is missing"},
        {{"--socket-fd", "3", "--cores", "0"}, "--arena-fd is missing"},
        {{"--arena-fd"}, "--arena-fd: its value is missing"},
        {{"--arena-fd", "x"}, "--arena-fd must be a number from 0 to 2147483647, got 'x'"},
        {{"--arena-fd", "-1"}, "--arena-fd must be a number from 0 to 2147483647, got '-1'"},
        {{"--word-timeout-ms", "0"}, "--word-timeout-ms must be a number from 1 to 2147483647, got '0'"},
        {{"--cores", "0,0"}, "must be distinct, got 0 twice"},
        {{"--colour", "blue"}, "--colour: there is no such option"},
        {{"--arena-fd", "0", "--socket-fd", "0", "--cores", "0"}, "--socket-fd must be "},
    };
    for (const Case& c : cases) {
        int status = 0;
        CHECK_CONTAINS(output_of_worker(c.arguments, status), c.output);
        CHECK(status > 0);
    }
}

}  // namespace
}  // namespace zenflow
