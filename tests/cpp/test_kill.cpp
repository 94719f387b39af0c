// A worker that is killed at any instant, and one that takes over: the result must not depend on the instant.
//
// The worker that users run is stepped instruction by instruction (ptrace), from before it reads its rounds until after it has
// answered them. What a killed worker leaves is the arena as it is then; whenever a step has changed it, another worker gets a
// copy and all the rounds once more. ZENFLOW_KILL_STRIDE says with how many changes that is done: 1 for each, n for every n-th.
#include <sys/ptrace.h>
#include <sys/wait.h>

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
using test::TrainerArena;
using test::WorkerProcess;

constexpr int64_t kSteps = 3;

// What training hands over: some rounds on a small arena.
struct Scenario {
    const char* name;
    uint32_t n_steps;  // of each round
    Rule rule;
    float look_ahead;
    uint32_t early = 0;
};

// Blocks of more than one tile, cut by a parameter group's end, the second with padding; bfloat16, so that published weights are
// rounded.
ArenaSpec small_spec() {
    ArenaSpec spec;
    spec.ranges = {{0, 150, 0, 0}, {160, 290, 1, 0}};
    spec.blocks = {{0, 170}, {170, 290}};
    spec.numel = 320;
    spec.n_step_records = 8;
    spec.n_pages = 2 * kSteps;
    spec.gradient_dtype = spec.weight_dtype = DataType::kBFloat16;
    return spec;
}

class Training {
  public:
    explicit Training(const Scenario& scenario) : arena_(small_spec()) {
        const ArenaSpec spec = small_spec();
        const test::State state = test::random_state(spec.numel, 11);
        std::memcpy(arena_.master(), state.master.data(), spec.numel * sizeof(float));
        std::memcpy(arena_.exp_avg(), state.exp_avg.data(), spec.numel * sizeof(float));
        std::memcpy(arena_.exp_avg_sq(), state.exp_avg_sq.data(), spec.numel * sizeof(float));
        for (int64_t step = 1; step <= kSteps; ++step) {
            arena_.hyperparameters(step, 0) = {1e-2, 0.9, 0.999, 1e-8, 0.1, 1, 0};
            arena_.hyperparameters(step, 1) = {2e-2, 0.8, 0.99, 1e-8, 0.1, 0, 0};
            arena_.write_word(step, step == 2 ? std::nanf("") : 0.5f);
            for (uint32_t b = 0; b < 2; ++b) {
                const Block& block = spec.blocks[b];
                const auto gradient = test::random_gradient(block.end - block.begin, static_cast<uint32_t>(2 * step) + b);
                const auto bytes = test::encode(gradient, spec.gradient_dtype);
                std::memcpy(arena_.page(page(step, b)), bytes.data(), bytes.size());
            }
        }
        for (uint32_t b = 0; b < 2; ++b) {
            std::vector<uint32_t> pages;
            for (uint32_t s = 0; s < scenario.n_steps; ++s) pages.push_back(page(1 + s, b));
            rounds_.push_back({static_cast<uint32_t>(MessageType::kRound), b, 1 + b, 1, scenario.n_steps, b,
                               static_cast<uint32_t>(scenario.rule), scenario.look_ahead, 0, scenario.early, 0});
            arena_.write_block_word(b, 1, 0.25f);
            pages_.push_back(pages);
        }
    }

    TrainerArena& arena() { return arena_; }

    void submit(WorkerProcess& worker) {
        for (size_t i = 0; i < rounds_.size(); ++i) worker.submit(rounds_[i], pages_[i]);
    }

    void receive(WorkerProcess& worker) {
        for (const Round& round : rounds_) CHECK_EQ(worker.receive_done().round_id, round.round_id);
    }

    // Everything that training reads: state, published weights, counts.
    std::string result() {
        const ArenaHeader& header = arena_.header();
        std::string bytes(reinterpret_cast<const char*>(arena_.memory() + header.step_records_offset),
                          header.journal_offset - header.step_records_offset);
        return bytes + std::to_string(header.resolved_step) + ' ' + std::to_string(header.completed_round);
    }

  private:
    static uint32_t page(int64_t step, uint32_t block) { return static_cast<uint32_t>(step - 1) * 2 + block; }

    TrainerArena arena_;
    std::vector<Round> rounds_;
    std::vector<std::vector<uint32_t>> pages_;
};

std::string image_of(TrainerArena& arena) { return {reinterpret_cast<const char*>(arena.memory()), arena.bytes()}; }

// Another worker carries out the same rounds on what was left.
std::string result_of_next_worker(const Scenario& scenario, const std::string& image) {
    Training training(scenario);
    std::memcpy(training.arena().memory(), image.data(), image.size());
    WorkerProcess worker(training.arena(), first_core());
    worker.receive_ready();
    training.submit(worker);
    training.receive(worker);
    return training.result();
}

void kill_everywhere(const Scenario& scenario) {
    Training undisturbed(scenario);
    WorkerProcess reference(undisturbed.arena(), first_core());
    reference.receive_ready();
    undisturbed.submit(reference);
    undisturbed.receive(reference);
    const std::string expected = undisturbed.result();

    Training training(scenario);
    const ArenaHeader& header = training.arena().header();
    WorkerProcess worker(training.arena(), first_core());
    worker.receive_ready();
    const pid_t pid = worker.pid();
    int status = 0;
    CHECK_EQ(ptrace(PTRACE_SEIZE, pid, nullptr, nullptr), 0);
    CHECK_EQ(ptrace(PTRACE_INTERRUPT, pid, nullptr, nullptr), 0);
    CHECK_EQ(waitpid(pid, &status, __WALL), pid);
    training.submit(worker);
    std::string image = image_of(training.arena());
    int changes = 0, in_hand = 0, between = 0;
    // Once it has answered the last round it waits for more, and a step does not end.
    while (worker.bytes_waiting() < 2 * (sizeof(Done) + sizeof(ThreadSpan))) {
        CHECK_EQ(ptrace(PTRACE_SINGLESTEP, pid, nullptr, nullptr), 0);
        CHECK_EQ(waitpid(pid, &status, __WALL), pid);
        CHECK(WIFSTOPPED(status));
        if (std::memcmp(image.data(), training.arena().memory(), image.size()) == 0) continue;
        image = image_of(training.arena());
        in_hand += header.begun_round != header.completed_round ? 1 : 0;
        between += header.begun_round == 1 && header.completed_round == 1 ? 1 : 0;
        ++changes;
        if (result_of_next_worker(scenario, image) != expected) {
            throw test::CheckFailed(std::string(scenario.name) + ": killed after " + std::to_string(changes) +
                                    " changes of the arena, the result differs");
        }
    }
    // At least each vector of each block, and the marks between the rounds.
    CHECK(in_hand >= 20);
    CHECK(between >= 1);
    worker.signal(SIGKILL);
    CHECK_EQ(worker.wait(), -SIGKILL);
}

TEST(kill, at_any_instant_of_one_update) { kill_everywhere({"one update", 1, Rule::kReplay, 0.0f}); }
TEST(kill, at_any_instant_of_an_early_update) { kill_everywhere({"an early update", 1, Rule::kReplay, 0.0f, 1}); }
TEST(kill, at_any_instant_of_a_window) { kill_everywhere({"a window", 3, Rule::kReplay, 2.0f}); }
TEST(kill, at_any_instant_of_a_mean) { kill_everywhere({"a mean", 3, Rule::kAccumulate, 0.0f}); }
TEST(kill, at_any_instant_of_publishing) { kill_everywhere({"publishing", 0, Rule::kReplay, 0.0f}); }

}  // namespace
}  // namespace zenflow
