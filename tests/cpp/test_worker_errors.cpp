// What the worker refuses, and what it says then. Where a test waits for the worker without a limit of its own, a hang is the
// failure; whoever runs the tests ends it.
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"
#include "trainer_arena.h"
#include "worker_process.h"

namespace zenflow {
namespace {

using test::ArenaSpec;
using test::first_core;
using test::output_of_worker;
using test::round_of;
using test::TrainerArena;
using test::WorkerProcess;

TEST(worker, refuses_a_round_out_of_turn) {
    TrainerArena arena{ArenaSpec{}};
    arena.header().begun_round = 5;
    arena.header().completed_round = 4;
    WorkerProcess worker(arena, first_core());
    worker.receive_ready();
    worker.submit(round_of(0, 4, 0, 0, 0), {});
    CHECK_EQ(worker.receive_done().round_id, 4);
    worker.submit(round_of(0, 6, 0, 0, 0), {});
    CHECK_CONTAINS(worker.receive_error(), "round_id is 6, but round 5 has been begun and is not complete");
    CHECK_EQ(worker.wait(), 1);
}

TEST(worker, refuses_a_journal_that_does_not_fit_the_round) {
    TrainerArena arena{ArenaSpec{}};
    arena.header().begun_round = 1;
    arena.header().n_shares = 1;
    arena.journal_slot(0).end = 65;
    WorkerProcess worker(arena, first_core());
    worker.receive_ready();
    worker.submit(round_of(0, 1, 0, 0, 0), {});
    CHECK_CONTAINS(worker.receive_error(), "journal: slot 0 is at 0 of [0, 65)");
    CHECK_EQ(worker.wait(), 1);
}

TEST(worker, reports_a_word_that_does_not_arrive) {
    const TrainerArena arena{ArenaSpec{}};
    WorkerProcess worker(arena, first_core(), {"--word-timeout-ms", "30"});
    worker.receive_ready();
    worker.submit(round_of(0, 1, 1, 2, 0), {0, 1});
    CHECK_EQ(worker.receive_error(), "step 1's clip coefficient did not arrive within 30 ms");
    CHECK_EQ(worker.wait(), 1);
}

TEST(worker, reports_what_is_wrong_with_a_round) {
    struct Case {
        Round round;
        std::vector<uint32_t> pages;
        const char* error;
    };
    const Case cases[] = {
        {round_of(2, 1, 1, 0, 0), {}, "block is 2"},
        {round_of(0, 1, 1, 0, 2), {}, "publish_buffer is 2"},
        {round_of(0, 1, 1, 1, 0), {6}, "pages[0] is 6"},
        {round_of(0, 1, 0, 1, 0), {0}, "first_step is 0"},
        {round_of(0, 1, 1, 5, 0), {0, 0, 0, 0, 0}, "n_steps is 5"},
        {round_of(0, 1, 4, 2, 0), {0, 0}, "last step is 5"},
        {round_of(0, 1, 1, 2, 0), {0}, "n_steps = 2 needs 64"},
        {round_of(0, 1, 1, 1, 0), {0, 0}, "n_steps = 1 needs 60"},
        {round_of(0, 1, 1, 0xffffffffu, 0), {0, 0}, "n_steps = 4294967295 needs"},
    };
    for (const Case& c : cases) {
        const TrainerArena arena{ArenaSpec{}};
        WorkerProcess worker(arena, first_core());
        worker.receive_ready();
        worker.submit(c.round, c.pages);
        CHECK_CONTAINS(worker.receive_error(), c.error);
        CHECK_EQ(worker.wait(), 1);
    }
}

TEST(worker, reports_a_message_it_does_not_know) {
    const TrainerArena arena{ArenaSpec{}};
    WorkerProcess worker(arena, first_core());
    worker.receive_ready();
    const MessageHeader message{77, 0};
    worker.send(&message, sizeof(message));
    CHECK_CONTAINS(worker.receive_error(), "type is 77");
    CHECK_EQ(worker.wait(), 1);
}

TEST(worker, reports_a_broken_arena_and_cores_it_cannot_use) {
    TrainerArena arena{ArenaSpec{}};
    WorkerProcess on_missing_core(arena, "8000");
    CHECK_CONTAINS(on_missing_core.receive_error(), "core 8000 cannot be used");
    CHECK_EQ(on_missing_core.wait(), 1);
    arena.header().n_step_records = 0;
    WorkerProcess on_broken_arena(arena, first_core());
    CHECK_CONTAINS(on_broken_arena.receive_error(), "n_step_records is 0");
    CHECK_EQ(on_broken_arena.wait(), 1);
}

TEST(worker, reports_an_environment_that_keeps_openmp_from_starting_its_threads) {
    const std::string cores = test::all_cores();
    if (cores.find(',') == std::string::npos) return;  // one core, one thread: nothing to forbid
    const TrainerArena arena{ArenaSpec{}};
    setenv("OMP_THREAD_LIMIT", "1", 1);
    WorkerProcess worker(arena, cores);
    unsetenv("OMP_THREAD_LIMIT");
    CHECK_CONTAINS(worker.receive_error(), "OMP_THREAD_LIMIT");
    CHECK_EQ(worker.wait(), 1);
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
        {{"--arena-fd", "x"}, "--arena-fd: 'x' is no number from 0"},
        {{"--arena-fd", "-1"}, "--arena-fd: '-1' is no number from 0"},
        {{"--word-timeout-ms", "0"}, "--word-timeout-ms: '0' is no number from 1"},
        {{"--cores", "0,0"}, "core 0 is listed twice"},
        {{"--colour", "blue"}, "--colour: there is no such option"},
        {{"--arena-fd", "0", "--socket-fd", "0", "--cores", "0"}, "--socket-fd: 0 is "},
    };
    for (const Case& c : cases) {
        int status = 0;
        CHECK_CONTAINS(output_of_worker(c.arguments, status), c.output);
        CHECK(status > 0);
    }
}

}  // namespace
}  // namespace zenflow
