// Requests to the worker: export of device-owned entries' state, by the function and through the worker; first touch of memory.
#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "reference_adamw.h"
#include "trainer_arena.h"
#include "worker/arena.h"
#include "worker/requests.h"
#include "worker_process.h"

namespace zenflow {
namespace {

using test::ArenaSpec;
using test::TrainerArena;
using test::WorkerProcess;

constexpr uint64_t kColumnsAt = 1024, kStateAt = 2048;  // in the export section

// Three tiles: selected columns of 300 rows, all of a vector's elements, and two columns of a part of a row.
class Case {
  public:
    explicit Case(DataType moments = DataType::kFloat32) : arena_(spec(moments)) {
        arena_.set_state(test::random_state(arena_.spec().numel, 5));
        const std::vector<Range>& ranges = arena_.spec().ranges;
        const std::vector<uint32_t> columns = {0, 3, 7, 8, 20, 40, 1, 4};
        std::memcpy(arena_.export_section() + kColumnsAt, columns.data(), columns.size() * sizeof(uint32_t));
        const uint64_t section = arena_.header().export_offset;
        const uint64_t columns_at = section + kColumnsAt, state_at = section + kStateAt;
        tiles_ = {{7, 300, 41, 6, columns_at, state_at, 1830, ranges[0].first_scale},
                  {12400, 30, 1, 1, 0, state_at + 1800 * 4, 1830, ranges[1].first_scale},
                  {12500, 1, 9, 2, columns_at + 6 * 4, state_at + 3 * 1830 * 4, 2, ranges[2].first_scale}};
    }

    TrainerArena& arena() { return arena_; }
    std::vector<ExportTile>& tiles() { return tiles_; }

    Export request() {
        std::memcpy(arena_.export_section(), tiles_.data(), tiles_.size() * sizeof(ExportTile));
        return {static_cast<uint32_t>(MessageType::kExport), static_cast<uint32_t>(tiles_.size()), 5,
                arena_.header().export_offset};
    }

    void check() {
        const test::State state = arena_.read_state();
        const std::vector<float>* const arrays[] = {&state.master, &state.exp_avg, &state.exp_avg_sq};
        for (const ExportTile& tile : tiles_) {
            for (uint64_t a = 0; a < 3; ++a) {
                const auto* const to =
                    reinterpret_cast<const float*>(arena_.memory() + tile.target_offset) + a * tile.target_stride;
                for (uint64_t i = 0; i < tile.rows * tile.n_columns; ++i) {
                    const uint64_t row = i / tile.n_columns;
                    uint64_t column = i % tile.n_columns;
                    if (tile.n_columns < tile.width) {
                        column = reinterpret_cast<const uint32_t*>(arena_.memory() + tile.columns_offset)[column];
                    }
                    const uint64_t element = tile.begin + row * tile.width + column;
                    CHECK_EQ(to[i], (*arrays[a])[element]);
                }
            }
        }
    }

  private:
    static ArenaSpec spec(DataType moments) {
        ArenaSpec spec;
        spec.moments_dtype = moments;
        spec.ranges = {{7, 12307, 0, 0, 0}, {12400, 12430, 0, 0, 0}, {12500, 12509, 0, 0, 0}};
        spec.blocks = {{0, 12600}};
        spec.numel = 12600;
        spec.export_bytes = kStateAt + 3 * 1830 * 4 + 3 * 2 * 4;
        return spec;
    }

    TrainerArena arena_;
    std::vector<ExportTile> tiles_;
};

TEST(requests, an_export_copies_the_entries_of_all_arrays) {
    for (const int n_threads : {1, 3}) {
        omp_set_num_threads(n_threads);
        for (const DataType moments : {DataType::kFloat32, DataType::kBFloat16, DataType::kInt8}) {
            Case c(moments);
            export_entries(Arena(c.arena().fd()), c.request());
            c.check();
        }
    }
}

TEST(requests, an_export_refuses_what_leaves_the_partition_or_the_section) {
    struct Change {
        const char* name;
        std::function<void(Case&, Export&)> apply;
    };
    const std::vector<Change> changes = {
        {"tiles", [](Case&, Export& r) { r.tiles_offset = 0; }},
        {"tiles", [](Case&, Export& r) { r.tiles_offset += 4; }},
        {"tiles", [](Case&, Export& r) { r.n_tiles = UINT32_MAX; }},
        {"partition", [](Case& c, Export&) { c.tiles()[0].rows = 308; }},
        {"partition", [](Case& c, Export&) { c.tiles()[0].rows = UINT64_MAX / 41; }},
        {"partition", [](Case& c, Export&) { c.tiles()[1].begin = UINT64_MAX; }},
        {"partition", [](Case& c, Export&) { c.tiles()[1].width = 0; }},
        {"n_columns", [](Case& c, Export&) { c.tiles()[0].n_columns = 0; }},
        {"n_columns", [](Case& c, Export&) { c.tiles()[0].n_columns = 42; }},
        {"columns", [](Case& c, Export&) { c.tiles()[0].columns_offset = 0; }},
        {"columns", [](Case& c, Export&) { c.tiles()[2].width = 4; }},
        {"target", [](Case& c, Export&) { c.tiles()[0].target_offset = c.arena().header().master_offset; }},
        {"target", [](Case& c, Export&) { c.tiles()[2].target_stride = 3; }},
        {"target_stride", [](Case& c, Export&) { c.tiles()[2].target_stride = UINT64_MAX / 2 - 1; }},
    };
    for (const Change& change : changes) {
        Case c;
        Export request = c.request();
        change.apply(c, request);
        c.request();  // writes the changed tiles
        CHECK_CONTAINS(test::error_of([&] { export_entries(Arena(c.arena().fd()), request); }), change.name);
    }
    Case c(DataType::kInt8);
    c.tiles()[2].first_scale = c.arena().header().n_scales;
    const Export request = c.request();
    CHECK_CONTAINS(test::error_of([&] { export_entries(Arena(c.arena().fd()), request); }), "first_scale");
}

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
    std::vector<unsigned char> flags((arena.bytes() + kPage - 1) / kPage);
    CHECK_EQ(mincore(arena.memory(), arena.bytes(), flags.data()), 0);
    std::vector<bool> result;
    for (const unsigned char flag : flags) result.push_back((flag & 1) != 0);
    return result;
}

// A worker that starts before the first job touches the states of its blocks, one after a restart does not. Nothing changes.
TEST(requests, states_are_touched_by_the_first_worker_only) {
    for (const int64_t n_jobs : {0, 1}) {
        TrainerArena trainer(large_spec());
        const ArenaHeader& header = trainer.header();
        trainer.header().begun_job = trainer.header().completed_job = n_jobs;
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
    const Arena arena(trainer.fd());
    omp_set_num_threads(3);
    std::vector<bool> expected = allocated(trainer);
    const uint64_t row = 10 * kPage, offset = arena.header().slots_offset / kPage * kPage;
    touch_rows(arena, {0, 0, 1, offset, 7, row});
    for (uint64_t page = 0; page < 70; ++page) expected[offset / kPage + page] = true;
    CHECK(allocated(trainer) == expected);
    CHECK_CONTAINS(test::error_of([&] { touch_rows(arena, {0, 0, 1, offset, arena.header().total_bytes, row}); }), "touch: ");
}

}  // namespace
}  // namespace zenflow
