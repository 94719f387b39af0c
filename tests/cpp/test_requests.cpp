// First touch of memory, by the function and through the worker.
#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "trainer_arena.h"
#include "worker/arena.h"
#include "worker_process.h"

namespace zenflow {
namespace {

using test::ArenaSpec;
using test::TrainerArena;
using test::WorkerProcess;

const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// Blocks of many pages of memory; one in no range, and one too small for all threads.
ArenaSpec large_spec() {
    ArenaSpec spec;
    spec.ranges = {{0, 400000, 0, 0, 0}, {600000, 600100, 1, 0, 0}};
    spec.blocks = {{0, 300000}, {300000, 400000}, {400000, 600000}, {600000, 600100}};
    spec.numel = 600100;
    return spec;
}

// For each page of the arena's memory, whether it is allocated.
std::vector<bool> allocated(TrainerArena& arena) {
    std::vector<unsigned char> flags((arena.n_bytes() + kPage - 1) / kPage);
    CHECK_EQ(mincore(arena.memory(), arena.n_bytes(), flags.data()), 0);
    std::vector<bool> result;
    for (const unsigned char flag : flags) result.push_back((flag & 1) != 0);
    return result;
}

// A worker that starts before the first job touches the states of its blocks, one after a restart does not. Nothing changes.
TEST(requests, states_are_touched_by_the_first_worker_only) {
    for (const int64_t n_jobs : {0, 1}) {
        TrainerArena trainer(large_spec());
        const ArenaHeader& header = trainer.header();
        trainer.live().begun_job = trainer.live().completed_job = n_jobs;
        trainer.master()[7] = 3.0f;
        std::vector<bool> expected = allocated(trainer);
        const auto before = std::count(expected.begin(), expected.end(), true);
        WorkerProcess worker(trainer, test::all_cores());
        worker.receive_ready();
        for (const Block& block : large_spec().blocks) {
            for (const uint64_t offset : {header.master_offset, header.exp_avg_offset, header.exp_avg_sq_offset}) {
                const uint64_t last = (offset + block.end * sizeof(float) - 1) / kPage;
                uint64_t page = (offset + block.begin * sizeof(float)) / kPage;
                for (; page <= last && n_jobs == 0; ++page) expected[page] = true;
            }
        }
        CHECK(allocated(trainer) == expected);
        CHECK(n_jobs > 0 || std::count(expected.begin(), expected.end(), true) > before + 1000);
        CHECK_EQ(trainer.master()[7], 3.0f);
        CHECK_EQ(trainer.master()[8], 0.0f);
    }
}

TEST(requests, rows_of_a_touch_are_allocated) {
    TrainerArena trainer(large_spec());
    omp_set_num_threads(3);
    std::vector<bool> expected = allocated(trainer);
    const uint64_t row = 10 * kPage, offset = trainer.header().slots_offset / kPage * kPage;
    trainer.touch({0, 0, 1, offset, 7, row});
    for (uint64_t page = 0; page < 70; ++page) expected[offset / kPage + page] = true;
    CHECK(allocated(trainer) == expected);
}

}  // namespace
}  // namespace zenflow
