// First touch of the optimizer state by the worker's threads.
#include <omp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "check.h"
#include "common/parallel.h"
#include "trainer_arena.h"
#include "worker/arena.h"
#include "worker/block_replay.h"
#include "worker/first_touch.h"
#include "worker/step_records.h"
#include "worker_process.h"

namespace zenflow {
namespace {

using test::ArenaSpec;
using test::TrainerArena;
using test::WorkerProcess;

constexpr std::chrono::milliseconds kLong{600000};
constexpr int kThreads = 3;

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// Blocks of many pages of memory; one in no range, and one too small for all threads.
ArenaSpec large_spec() {
    ArenaSpec spec;
    spec.ranges = {{0, 400000, 0, 0}, {600000, 600100, 1, 0}};
    spec.blocks = {{0, 300000}, {300000, 400000}, {400000, 600000}, {600000, 600100}};
    spec.numel = 600100;
    return spec;
}

// For each page of the arena's memory, whether it is allocated.
std::vector<bool> allocated(TrainerArena& arena) {
    std::vector<unsigned char> flags((arena.bytes() + page_bytes() - 1) / page_bytes());
    CHECK_EQ(mincore(arena.memory(), arena.bytes(), flags.data()), 0);
    std::vector<bool> result;
    for (const unsigned char flag : flags) result.push_back((flag & 1) != 0);
    return result;
}

// Sets the pages that hold elements [begin, end) of one of the arena's arrays.
void add(std::vector<bool>& pages, uint64_t array_offset, uint64_t begin, uint64_t end) {
    const uint64_t first = (array_offset + begin * sizeof(float)) / page_bytes();
    const uint64_t last = (array_offset + end * sizeof(float) - 1) / page_bytes();
    for (uint64_t page = first; page <= last; ++page) pages[page] = true;
}

void add_states(std::vector<bool>& pages, const ArenaHeader& header, uint64_t begin, uint64_t end) {
    for (const uint64_t offset : {header.master_offset, header.exp_avg_offset, header.exp_avg_sq_offset}) {
        add(pages, offset, begin, end);
    }
}

TEST(first_touch, allocates_the_memory_of_a_share_and_no_other) {
    TrainerArena trainer(large_spec());
    const Arena arena(trainer.fd());
    std::vector<bool> expected = allocated(trainer);
    const auto tables = std::count(expected.begin(), expected.end(), true);
    touch_states(arena, {100001, 200003});
    add_states(expected, arena.header(), 100001, 200003);
    CHECK(allocated(trainer) == expected);
    CHECK(std::count(expected.begin(), expected.end(), true) > tables + 250);
}

TEST(first_touch, allocates_the_states_that_are_updated) {
    TrainerArena trainer(large_spec());
    const Arena arena(trainer.fd());
    const StepRecords records(arena, kLong);
    BlockReplay replay(arena, records);
    omp_set_num_threads(kThreads);
    std::vector<bool> expected = allocated(trainer);
    replay.touch_states();
    for (const Range& range : arena.ranges()) add_states(expected, arena.header(), range.begin, range.end);
    CHECK(allocated(trainer) == expected);
}

TEST(first_touch, changes_nothing) {
    TrainerArena trainer(large_spec());
    for (uint64_t i = 0; i < trainer.header().numel; ++i) trainer.master()[i] = static_cast<float>(i);
    const std::vector<std::byte> before(trainer.memory(), trainer.memory() + trainer.bytes());
    const Arena arena(trainer.fd());
    const StepRecords records(arena, kLong);
    BlockReplay(arena, records).touch_states();
    CHECK_EQ(std::memcmp(before.data(), trainer.memory(), trainer.bytes()), 0);
}

// A worker that starts before the first job touches the states, one after a restart does not.
TEST(first_touch, is_done_by_the_first_worker_only) {
    for (const int64_t n_jobs : {0, 1}) {
        TrainerArena trainer(large_spec());
        trainer.header().begun_job = trainer.header().completed_job = n_jobs;
        std::vector<bool> expected = allocated(trainer);
        WorkerProcess worker(trainer, test::all_cores());
        worker.receive_ready();
        if (n_jobs == 0) {
            for (const Range& range : large_spec().ranges) add_states(expected, trainer.header(), range.begin, range.end);
        }
        CHECK(allocated(trainer) == expected);
    }
}

TEST(first_touch, allocates_the_rows_of_a_request) {
    TrainerArena trainer(large_spec());
    const Arena arena(trainer.fd());
    omp_set_num_threads(kThreads);
    std::vector<bool> expected = allocated(trainer);
    const uint64_t row = 10 * page_bytes(), offset = arena.header().slots_offset / page_bytes() * page_bytes();
    touch_rows(arena, {0, 0, 1, offset, 7, row});
    for (uint64_t page = 0; page < 70; ++page) expected[offset / page_bytes() + page] = true;
    CHECK(allocated(trainer) == expected);
    CHECK_CONTAINS(test::error_of([&] { touch_rows(arena, {0, 0, 1, offset, arena.header().total_bytes, row}); }), "touch: ");
}

int64_t page_faults_of_this_thread() {
    rusage usage{};
    CHECK_EQ(getrusage(RUSAGE_THREAD, &usage), 0);
    return usage.ru_minflt;
}

// Each thread allocates the memory of the elements that it updates according to the journal.
TEST(first_touch, threads_touch_what_they_update) {
    ArenaSpec spec = large_spec();
    spec.ranges = {{0, 600100, 0, 0}};
    spec.blocks = {{0, 600100}};
    TrainerArena trainer(spec);
    const Arena arena(trainer.fd());
    const StepRecords records(arena, kLong);
    BlockReplay replay(arena, records);
    omp_set_num_threads(kThreads);
    std::vector<int64_t> before(kThreads);
    std::vector<int64_t> faults(kThreads);
    run_in_parallel([&](int thread, int) { before[static_cast<size_t>(thread)] = page_faults_of_this_thread(); });
    replay.touch_states();
    run_in_parallel([&](int thread, int) {
        const auto index = static_cast<size_t>(thread);
        faults[index] = page_faults_of_this_thread() - before[index];
    });
    replay.run(test::job_of(0, 1, 0, 0), nullptr);
    CHECK_EQ(trainer.header().n_shares, static_cast<uint64_t>(kThreads));
    for (size_t i = 0; i < kThreads; ++i) {
        const JournalEntry& entry = trainer.journal_entry(i);
        const auto pages = static_cast<int64_t>(3 * (entry.end - entry.begin) * sizeof(float) / page_bytes());
        CHECK(pages > 500);
        // Pages at its ends may have been its neighbours'.
        CHECK(faults[i] >= pages - 6);
    }
}

}  // namespace
}  // namespace zenflow
