// The worker process from start to end, seen from the trainer's side. Where a test waits for the worker without a limit of its
// own, a hang is the failure; whoever runs the tests ends it.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "reference_adamw.h"
#include "trainer_arena.h"
#include "worker_process.h"

namespace zenflow {
namespace {

using test::ArenaSpec;
using test::first_core;
using test::output_of_worker;
using test::round_of;
using test::State;
using test::TrainerArena;
using test::WorkerProcess;

constexpr Hyperparameters kGroup0{1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 0};
constexpr Hyperparameters kGroup1{2e-3, 0.8, 0.99, 1e-6, 0.01, 0, 0};
constexpr float kSkipped = 0.0f;  // in the table of clip coefficients: the device wrote NaN

// A trainer with two blocks over two parameter groups, padding between them, and the state that AdamW should have reached.
class Training {
  public:
    explicit Training(DataType type) : spec_(make_spec(type)), arena_(spec_), expected_(test::random_state(spec_.numel, 5)) {
        std::memcpy(arena_.master(), expected_.master.data(), spec_.numel * sizeof(float));
        std::memcpy(arena_.exp_avg(), expected_.exp_avg.data(), spec_.numel * sizeof(float));
        std::memcpy(arena_.exp_avg_sq(), expected_.exp_avg_sq.data(), spec_.numel * sizeof(float));
    }

    TrainerArena& arena() { return arena_; }

    // Everything of a step but its word.
    void prepare(int64_t step) {
        for (uint32_t group = 0; group < 2; ++group) arena_.hyperparameters(step, group) = hyperparameters(step, group);
        for (uint32_t b = 0; b < spec_.blocks.size(); ++b) {
            const auto bytes = test::encode(gradient(step, b), spec_.gradient_dtype);
            std::memcpy(arena_.page(page(step, b)), bytes.data(), bytes.size());
        }
    }

    // The step's word.
    void arrive(int64_t step, float clip) {
        if (clip != kSkipped) ++count_;
        clips_.push_back(clip);
        counts_.push_back(count_);
        arena_.write_word(step, clip == kSkipped ? std::nanf("") : clip);
    }

    static uint32_t page(int64_t step, uint32_t block) { return static_cast<uint32_t>(step) % 4 * 2 + block; }
    static std::vector<uint32_t> pages(int64_t first_step, uint32_t n_steps, uint32_t block) {
        std::vector<uint32_t> result;
        for (uint32_t i = 0; i < n_steps; ++i) result.push_back(page(first_step + i, block));
        return result;
    }

    // What a round does, done to the expected state.
    void expect(uint32_t b, int64_t first_step, uint32_t n_steps) {
        const Block& block = spec_.blocks[b];
        for (int64_t step = first_step; step < first_step + n_steps; ++step) {
            const auto index = static_cast<size_t>(step - 1);
            if (clips_[index] == kSkipped) continue;
            const auto bytes = test::encode(gradient(step, b), spec_.gradient_dtype);
            std::vector<float> rounded = test::decode(bytes.data(), block.end - block.begin, spec_.gradient_dtype);
            rounded.insert(rounded.begin(), block.begin, 0.0f);
            for (const Range& range : spec_.ranges) {
                const auto [begin, end] = intersection(range, block);
                test::reference_step(expected_, rounded.data(), hyperparameters(step, range.param_group), counts_[index],
                                     clips_[index], begin, end);
            }
        }
    }

    void check_state() {
        test::check_same_bits("master", arena_.master(), expected_.master.data(), spec_.numel);
        test::check_same_bits("exp_avg", arena_.exp_avg(), expected_.exp_avg.data(), spec_.numel);
        test::check_same_bits("exp_avg_sq", arena_.exp_avg_sq(), expected_.exp_avg_sq.data(), spec_.numel);
    }

    void check_published(uint32_t b, uint32_t publish_buffer) {
        const Block& block = spec_.blocks[b];
        const size_t element_bytes = spec_.weight_dtype == DataType::kFloat32 ? 4 : 2;
        for (const Range& range : spec_.ranges) {
            const auto [begin, end] = intersection(range, block);
            const std::vector<float> weights(&expected_.master[begin], &expected_.master[end]);
            test::check_same_bytes("published", arena_.publish_buffer(publish_buffer) + (begin - block.begin) * element_bytes,
                                   weights, spec_.weight_dtype);
        }
    }

  private:
    static ArenaSpec make_spec(DataType type) {
        ArenaSpec spec;
        spec.ranges = {{0, 30000, 0, 0}, {30016, 50001, 1, 0}};
        spec.blocks = {{0, 33000}, {33000, 50048}};
        spec.numel = 50048;
        spec.n_step_records = 4;
        spec.n_pages = 8;
        spec.n_publish_buffers = 3;
        spec.gradient_dtype = spec.weight_dtype = type;
        return spec;
    }

    static Hyperparameters hyperparameters(int64_t step, uint32_t param_group) {
        Hyperparameters result = param_group == 0 ? kGroup0 : kGroup1;
        result.lr /= static_cast<double>(step);
        return result;
    }

    static std::pair<uint64_t, uint64_t> intersection(const Range& range, const Block& block) {
        const uint64_t begin = std::max(range.begin, block.begin);
        return {begin, std::max(begin, std::min(range.end, block.end))};
    }

    std::vector<float> gradient(int64_t step, uint32_t b) const {
        return test::random_gradient(spec_.blocks[b].end - spec_.blocks[b].begin, static_cast<uint32_t>(step) * 2 + b);
    }

    ArenaSpec spec_;
    TrainerArena arena_;
    State expected_;
    int64_t count_ = 0;
    std::vector<float> clips_;     // of step index + 1
    std::vector<int64_t> counts_;  // the same
};

void check_done(const Done& done, uint32_t block, int64_t round_id) {
    CHECK_EQ(done.block, block);
    CHECK_EQ(done.round_id, round_id);
    CHECK(done.start_ns > 0);
    CHECK(done.wait_ns >= 0);
    CHECK(done.busy_ns > 0);
}

// Several rounds over two blocks and two parameter groups, then a second worker on the same memory.
void train(DataType type) {
    Training training(type);
    const std::string cores = test::all_cores();
    WorkerProcess worker(training.arena(), cores);
    const Ready ready = worker.receive_ready();
    CHECK_EQ(ready.version, kVersion);
    CHECK_EQ(ready.n_threads, 1 + static_cast<uint32_t>(std::count(cores.begin(), cores.end(), ',')));

    // Without steps a round only publishes.
    worker.submit(round_of(0, 1, 0, 0, 2), {});
    check_done(worker.receive_done(), 0, 1);
    training.check_state();
    training.check_published(0, 2);

    // A window of two steps that is submitted before its data is there. The other block's round finds the steps resolved.
    training.prepare(1);
    training.arrive(1, 0.5f);
    worker.submit(round_of(0, 2, 1, 2, 0), training.pages(1, 2, 0));
    worker.submit(round_of(1, 3, 1, 2, 1), training.pages(1, 2, 1));
    training.prepare(2);
    training.arrive(2, 1.0f);
    check_done(worker.receive_done(), 0, 2);
    check_done(worker.receive_done(), 1, 3);
    CHECK_EQ(training.arena().header().resolved_step, 2);
    CHECK_EQ(training.arena().record(2).count, 2);
    training.expect(0, 1, 2);
    training.expect(1, 1, 2);
    training.check_state();
    training.check_published(0, 0);
    training.check_published(1, 1);

    // A step whose gradient was not finite is left out. What was submitted before the exit is still done.
    training.prepare(3);
    training.prepare(4);
    training.arrive(3, kSkipped);
    training.arrive(4, 0.25f);
    worker.submit(round_of(0, 4, 3, 2, 2), training.pages(3, 2, 0));
    worker.submit(round_of(1, 5, 3, 1, 0), training.pages(3, 1, 1));
    worker.submit(round_of(1, 6, 4, 1, 1), training.pages(4, 1, 1));
    worker.ask_to_exit();
    check_done(worker.receive_done(), 0, 4);
    check_done(worker.receive_done(), 1, 5);
    check_done(worker.receive_done(), 1, 6);
    CHECK_EQ(worker.wait(), 0);
    CHECK_EQ(training.arena().header().resolved_step, 4);
    CHECK_EQ(training.arena().record(4).count, 3);
    training.expect(0, 3, 2);
    training.expect(1, 3, 2);
    training.check_state();
    training.check_published(0, 2);
    training.check_published(1, 1);

    // A worker that starts later goes on from there; the ring's first record and its pages are used for the second time.
    WorkerProcess next(training.arena(), first_core());
    next.receive_ready();
    training.prepare(5);
    training.arrive(5, 1.0f);
    next.submit(round_of(0, 7, 5, 1, 1), training.pages(5, 1, 0));
    check_done(next.receive_done(), 0, 7);
    CHECK_EQ(training.arena().record(5).count, 4);
    training.expect(0, 5, 1);
    training.check_state();
    training.check_published(0, 1);
    next.ask_to_exit();
    CHECK_EQ(next.wait(), 0);
}

TEST(worker, replays_rounds_in_float32) { train(DataType::kFloat32); }
TEST(worker, replays_rounds_in_bfloat16) { train(DataType::kBFloat16); }
TEST(worker, replays_rounds_in_float16) { train(DataType::kFloat16); }

// Several threads, killed at random instants; test_kill.cpp has every instant, for one thread. Rounds whose answer was lost are
// submitted again like all others.
TEST(worker, carries_on_where_killed_ones_were) {
    Training training(DataType::kBFloat16);
    training.prepare(1);
    training.prepare(2);
    training.arrive(1, 0.5f);
    training.arrive(2, 1.0f);
    const auto submit = [&](WorkerProcess& worker) {
        worker.submit(round_of(0, 1, 1, 2, 0), training.pages(1, 2, 0));
        worker.submit(round_of(1, 2, 1, 2, 1), training.pages(1, 2, 1));
    };
    uint32_t random = 1;
    for (int kill = 0; kill < 15; ++kill) {
        WorkerProcess worker(training.arena(), test::all_cores());
        worker.receive_ready();
        submit(worker);
        random = random * 1664525u + 1013904223u;
        std::this_thread::sleep_for(std::chrono::microseconds(random % 400));
        worker.signal(SIGKILL);
        CHECK_EQ(worker.wait(), -SIGKILL);
    }
    WorkerProcess worker(training.arena(), first_core());
    worker.receive_ready();
    submit(worker);
    CHECK_EQ(worker.receive_done().round_id, 1);
    CHECK_EQ(worker.receive_done().round_id, 2);
    training.expect(0, 1, 2);
    training.expect(1, 1, 2);
    training.check_state();
    training.check_published(0, 0);
    training.check_published(1, 1);
    CHECK_EQ(training.arena().record(2).count, 2);
}

TEST(worker, leaves_quietly_when_an_idle_trainer_dies) {
    const TrainerArena arena{ArenaSpec{}};
    WorkerProcess worker(arena, first_core());
    worker.receive_ready();
    worker.close_socket();
    CHECK_EQ(worker.wait(), 0);
}

TEST(worker, leaves_quietly_when_the_trainer_dies_while_a_word_is_awaited) {
    TrainerArena arena{ArenaSpec{}};
    WorkerProcess worker(arena, first_core());
    worker.receive_ready();
    // The first is served, so that the worker is known to be at the second, which never can be.
    arena.write_word(1, 1.0f);
    worker.submit(round_of(0, 1, 1, 1, 0), {0});
    worker.submit(round_of(0, 2, 2, 1, 0), {0});
    worker.submit(round_of(1, 3, 2, 1, 1), {1});
    worker.receive_done();
    worker.close_socket();
    CHECK_EQ(worker.wait(), 0);
    CHECK_EQ(arena.header().resolved_step, 1);
}

TEST(worker, leaves_quietly_when_the_trainer_died_before_it_was_ready) {
    const TrainerArena arena{ArenaSpec{}};
    WorkerProcess worker(arena, first_core());
    worker.close_socket();
    CHECK_EQ(worker.wait(), 0);
}

TEST(worker, is_not_ended_by_the_terminal) {
    const TrainerArena arena{ArenaSpec{}};
    WorkerProcess worker(arena, first_core());
    worker.receive_ready();
    worker.signal(SIGINT);
    worker.signal(SIGHUP);
    worker.submit(round_of(0, 1, 0, 0, 0), {});
    worker.receive_done();
    worker.signal(SIGTERM);
    CHECK_EQ(worker.wait(), -SIGTERM);
}

TEST(worker, prints_layout_and_version) {
    int status = -1;
    const std::string layout = output_of_worker({"--layout"}, status);
    CHECK_EQ(status, 0);
    CHECK_CONTAINS(layout, "sizeof(Round) 56\n");
    CHECK_CONTAINS(layout, "ArenaHeader.numel 32\n");
    CHECK_CONTAINS(layout, "kMaxMessageBytes 16384\n");
    CHECK_CONTAINS(output_of_worker({"--version"}, status), "protocol " + std::to_string(kVersion));
    CHECK_EQ(status, 0);
}

}  // namespace
}  // namespace zenflow
