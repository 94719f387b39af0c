// A worker is killed at any instant and another one continues: the result must not depend on the instant.
//
// The released executable is single-stepped (ptrace), from before it reads its jobs until it has acknowledged them. Whenever an
// instruction has changed the arena, another worker gets a copy of it and all jobs again.
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "trainer.h"

namespace zenflow {
namespace {

using test::TrainerArena;
using test::WorkerProcess;

// A job that commits one step per slot, without prediction.
UpdateJob job_of(uint32_t block, int64_t job_id, int64_t first_step, uint32_t n_steps, uint32_t publish_buffer) {
    return {static_cast<uint32_t>(MessageType::kJob), block, job_id, first_step, n_steps, publish_buffer, 0.0f, Tentative::kNone};
}

// The same with a tentative last step.
UpdateJob tentative(UpdateJob job, Tentative kind) {
    --job.n_committed;
    job.tentative = kind;
    return job;
}

// The arenas, by the type of their moments.
constexpr const char *kFloat = "torch.float32", *kBFloat16 = "torch.bfloat16", *kInt8 = "torch.int8";

// A job for each of two blocks of an arena of three steps, perhaps with another one that shows its tentative step with the true
// factor. Blocks have more than one tile, and one is cut by a parameter group's end and padding.
struct Scenario {
    const char* name;
    uint32_t n_steps;  // of each job
    float prediction_steps = 0.0f;
    Tentative tentative = Tentative::kNone;  // the last of the steps
    const char* arena = kFloat;
    bool newest_first = false;
    bool corrects = false;
    float predicted = 0.25f;  // the true one is 0.5, and not finite in step 2
};

class Training {
  public:
    explicit Training(const Scenario& scenario) : arena_(scenario.arena) {
        arena_.live().newest_first = scenario.newest_first ? 1 : 0;
        for (uint32_t b = 0; b < 2; ++b) {
            jobs_.push_back(job_of(b, 1 + b, 1, scenario.n_steps, b));
            jobs_[b].prediction_steps = scenario.prediction_steps;
            if (scenario.tentative != Tentative::kNone) jobs_[b] = tentative(jobs_[b], scenario.tentative);
            arena_.write_block_word(b, scenario.n_steps, scenario.predicted);
        }
        for (uint32_t b = 0; scenario.corrects && b < 2; ++b) {
            jobs_.push_back(tentative(job_of(b, 3 + b, scenario.n_steps, 1, b), Tentative::kCorrection));
            jobs_.back().prediction_steps = scenario.prediction_steps;
        }
    }

    TrainerArena& arena() { return arena_; }
    size_t n_jobs() const { return jobs_.size(); }

    void submit(WorkerProcess& worker) {
        for (const UpdateJob& job : jobs_) {
            std::vector<uint32_t> slots;
            for (uint64_t s = 0; s < n_steps_of(job); ++s) {
                slots.push_back(static_cast<uint32_t>(2 * (static_cast<uint64_t>(job.first_step) + s)) + job.block);
            }
            worker.submit(job, slots);
        }
    }

    // Everything that training reads, once a worker has acknowledged all jobs: state, published weights, counts.
    std::string result_of(WorkerProcess& worker) {
        worker.receive_ready();
        submit(worker);
        // In any order.
        std::vector<int64_t> done, submitted;
        for (const UpdateJob& job : jobs_) {
            submitted.push_back(job.job_id);
            done.push_back(worker.receive_done().job_id);
        }
        std::sort(done.begin(), done.end());
        CHECK(done == submitted);
        const ArenaHeader& header = arena_.live();
        CHECK_EQ(header.begun_job, header.completed_job);
        const std::string all = arena_.image();
        const std::string records =
            all.substr(header.step_records_offset, header.block_words_offset - header.step_records_offset);
        return records + all.substr(header.master_offset) + std::to_string(header.resolved_step) + ' ' +
               std::to_string(arena_.completed_job_of(0)) + ' ' + std::to_string(arena_.completed_job_of(1));
    }

  private:
    TrainerArena arena_;
    std::vector<UpdateJob> jobs_;
};

// Another worker executes the same jobs on a copy of the arena.
std::string result_of_next_worker(const Scenario& scenario, const std::string& image) {
    Training training(scenario);
    std::memcpy(training.arena().memory(), image.data(), image.size());
    WorkerProcess worker(training.arena());
    return training.result_of(worker);
}

void kill_everywhere(const Scenario& scenario) {
    Training initial(scenario);
    const std::string expected = result_of_next_worker(scenario, initial.arena().image());

    Training training(scenario);
    const ArenaHeader& header = training.arena().live();
    WorkerProcess worker(training.arena());
    worker.receive_ready();
    const pid_t pid = worker.pid();
    int status = 0;
    CHECK_EQ(ptrace(PTRACE_SEIZE, pid, nullptr, nullptr), 0);
    CHECK_EQ(ptrace(PTRACE_INTERRUPT, pid, nullptr, nullptr), 0);
    CHECK_EQ(waitpid(pid, &status, __WALL), pid);
    training.submit(worker);
    std::string image = training.arena().image();
    int changes = 0, in_progress = 0, between = 0;
    // After the last Done it waits for a message, and a single step would block.
    while (worker.bytes_waiting() < training.n_jobs() * sizeof(Done)) {
        CHECK_EQ(ptrace(PTRACE_SINGLESTEP, pid, nullptr, nullptr), 0);
        CHECK_EQ(waitpid(pid, &status, __WALL), pid);
        CHECK(WIFSTOPPED(status));
        if (std::memcmp(image.data(), training.arena().memory(), image.size()) == 0) continue;
        image = training.arena().image();
        in_progress += header.begun_job != header.completed_job ? 1 : 0;
        const int64_t first = scenario.newest_first ? 2 : 1;
        between += header.begun_job == first && header.completed_job == first ? 1 : 0;
        ++changes;
        if (result_of_next_worker(scenario, image) != expected) {
            throw test::CheckFailed(std::string(scenario.name) + ": killed after " + std::to_string(changes) +
                                    " changes of the arena, the result differs");
        }
    }
    // At least each vector of each block, and the marks between the jobs.
    CHECK(in_progress >= 20);
    CHECK(between >= 1);
    worker.signal(SIGKILL);
    CHECK_EQ(worker.wait(), -SIGKILL);
}

TEST(kill, at_any_instant) {
    constexpr auto kPredicted = Tentative::kPredicted;
    const Scenario scenarios[] = {
        {"a tentative update", 1, 0.0f, kPredicted},
        {"a window one behind", 3, 2.0f, kPredicted},
        {"one behind with short moments", 2, 0.0f, kPredicted, kBFloat16},
        {"a window with short moments", 3, 2.0f, Tentative::kNone, kBFloat16},
        {"one behind in 8 bits", 2, 0.0f, kPredicted, kInt8},
        {"a window in 8 bits", 3, 2.0f, Tentative::kNone, kInt8},
        {"corrected in 8 bits", 3, 0.0f, kPredicted, kInt8, true, true},
        {"a window", 3, 2.0f},
        {"one behind, newest first", 2, 0.0f, kPredicted, kFloat, true},
        {"corrected, newest first", 3, 0.0f, kPredicted, kFloat, true, true},
        {"corrected, not finite", 2, 0.0f, kPredicted, kFloat, true, true},
        {"corrected with short moments", 3, 0.0f, kPredicted, kBFloat16, true, true},
        {"predicted rightly", 3, 0.0f, kPredicted, kFloat, true, true, 0.5f},
        {"true at once", 3, 0.0f, Tentative::kTrueIfKnown, kFloat, true, true},
        {"publishing", 0},
    };
    for (const Scenario& scenario : scenarios) kill_everywhere(scenario);
}

}  // namespace
}  // namespace zenflow
