// The worker process from start to end, seen from the trainer's side. Where a test waits for the worker without a limit of its own, a
// hang is the failure; whoever runs the tests ends it.
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <string>
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
using test::State;
using test::TrainerArena;
using test::WorkerProcess;

constexpr Hyperparameters kGroup0{1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 0};
constexpr Hyperparameters kGroup1{2e-3, 0.8, 0.99, 1e-6, 0.01, 0, 0};
constexpr float kSkipped = 0.0f;  // in the table of clip coefficients: the device wrote NaN

Round round_of(uint32_t block, int64_t round_id, int64_t first_step, uint32_t n_steps, uint32_t publish_buffer) {
    return {static_cast<uint32_t>(MessageType::kRound), block, round_id, first_step, n_steps, publish_buffer};
}

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
        arena_.hyperparameters(step, 0) = kGroup0;
        arena_.hyperparameters(step, 0).lr /= static_cast<double>(step);
        arena_.hyperparameters(step, 1) = kGroup1;
        for (uint32_t b = 0; b < spec_.blocks.size(); ++b) {
            const auto bytes = test::encode(gradient(step, b), spec_.gradient_dtype);
            std::memcpy(arena_.page(page(step, b)), bytes.data(), bytes.size());
        }
    }

    // The step's word, and the update it stands for.
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

    // Applies the steps to the expected state and compares the whole of it, and the published block.
    void check_round(uint32_t b, int64_t first_step, uint32_t n_steps, uint32_t publish_buffer) {
        const Block& block = spec_.blocks[b];
        for (int64_t step = first_step; step < first_step + n_steps; ++step) {
            const auto index = static_cast<size_t>(step - 1);
            if (clips_[index] == kSkipped) continue;
            auto bytes = test::encode(gradient(step, b), spec_.gradient_dtype);
            std::vector<float> rounded = test::decode(bytes.data(), block.end - block.begin, spec_.gradient_dtype);
            rounded.insert(rounded.begin(), block.begin, 0.0f);
            for (const Range& range : spec_.ranges) {
                const uint64_t begin = std::max(range.begin, block.begin);
                const uint64_t end = std::min(range.end, block.end);
                Hyperparameters h = range.param_group == 0 ? kGroup0 : kGroup1;
                if (range.param_group == 0) h.lr /= static_cast<double>(step);
                if (begin < end) test::reference_step(expected_, rounded.data(), h, counts_[index], clips_[index], begin, end);
            }
        }
        const size_t n = spec_.numel;
        test::check_same_bits("master", arena_.master(), expected_.master.data(), n);
        test::check_same_bits("exp_avg", arena_.exp_avg(), expected_.exp_avg.data(), n);
        test::check_same_bits("exp_avg_sq", arena_.exp_avg_sq(), expected_.exp_avg_sq.data(), n);
        for (const Range& range : spec_.ranges) {
            const uint64_t begin = std::max(range.begin, block.begin);
            const uint64_t end = std::max(begin, std::min(range.end, block.end));
            const size_t element_bytes = spec_.weight_dtype == DataType::kFloat32 ? 4 : 2;
            const std::vector<float> weights(expected_.master.begin() + static_cast<std::ptrdiff_t>(begin),
                                             expected_.master.begin() + static_cast<std::ptrdiff_t>(end));
            test::check_same_bytes("published", arena_.publish_buffer(publish_buffer) + (begin - block.begin) * element_bytes, weights,
                                   spec_.weight_dtype);
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
    CHECK(done.wait_ns >= 0);
    CHECK(done.busy_ns > 0);
}

void train(DataType type) {
    Training training(type);
    WorkerProcess worker(training.arena(), first_core());
    const Ready ready = worker.receive_ready();
    CHECK_EQ(ready.version, kVersion);
    CHECK_EQ(ready.n_threads, 1u);

    // Publishes only; names no steps.
    worker.submit(round_of(0, 1, 0, 0, 2), {});
    check_done(worker.receive_done(), 0, 1);
    training.check_round(0, 1, 0, 2);

    // A window of two steps whose last word is late: the round is there before its data. The other block's round of the same steps then
    // finds them resolved.
    training.prepare(1);
    training.arrive(1, 0.5f);
    worker.submit(round_of(0, 2, 1, 2, 0), training.pages(1, 2, 0));
    worker.submit(round_of(1, 3, 1, 2, 1), training.pages(1, 2, 1));
    training.prepare(2);
    training.arrive(2, 1.0f);
    check_done(worker.receive_done(), 0, 2);
    check_done(worker.receive_done(), 1, 3);
    CHECK_EQ(training.arena().header().resolved_step, 2);
    CHECK_EQ(training.arena().header().resolved_count, 2);

    // Steps that the ring's records and the pages are used for again; one of them is left out.
    for (int64_t step = 3; step <= 4; ++step) {
        training.prepare(step);
        training.arrive(step, step == 3 ? kSkipped : 0.25f);
    }
    worker.submit(round_of(0, 4, 3, 2, 2), training.pages(3, 2, 0));
    check_done(worker.receive_done(), 0, 4);
    CHECK_EQ(training.arena().header().resolved_step, 4);
    CHECK_EQ(training.arena().header().resolved_count, 3);
    worker.submit(round_of(1, 5, 3, 2, 0), training.pages(3, 2, 1));
    // What was submitted before the exit is still done.
    worker.ask_to_exit();
    check_done(worker.receive_done(), 1, 5);
    CHECK_EQ(worker.wait(), 0);

    // A worker that starts later goes on with the same state.
    WorkerProcess next(training.arena(), first_core());
    next.receive_ready();
    training.prepare(5);
    training.arrive(5, 1.0f);
    next.submit(round_of(0, 6, 5, 1, 1), training.pages(5, 1, 0));
    check_done(next.receive_done(), 0, 6);
    CHECK_EQ(training.arena().header().resolved_count, 4);
    next.ask_to_exit();
    CHECK_EQ(next.wait(), 0);

    // The expected state in the order of the rounds; what block 0 published last is still there.
    training.check_final();
}

}  // namespace
}  // namespace zenflow
