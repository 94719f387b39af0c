#include "step_records.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>

#include "error.h"

namespace zenflow {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kSpins = 1000;  // some 20 to 50 us
constexpr microseconds kShortestSleep{20};
constexpr microseconds kLongestSleep{200};
constexpr milliseconds kTrainerCheckInterval{10};

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// Once it is the expected one, everything written before it can be read.
int64_t sequence_of(const StepWord& word) { return __atomic_load_n(&word.sequence, __ATOMIC_ACQUIRE); }

}  // namespace

StepRecords::StepRecords(const Arena& arena, milliseconds word_timeout) : arena_(arena), word_timeout_(word_timeout) {}

void StepRecords::check(int64_t first_step, uint32_t n_steps) const {
    if (n_steps == 0) return;
    const int64_t capacity = arena_.header().n_step_records;
    if (n_steps > capacity) fail("round: n_steps is ", n_steps, ", allowed are up to n_step_records = ", capacity);
    if (first_step < 1 || first_step > std::numeric_limits<int64_t>::max() - n_steps) {
        fail("round: first_step is ", first_step, ", allowed are numbers from 1");
    }
    const int64_t last_step = first_step + n_steps - 1;
    const int64_t resolved_step = arena_.resolved_step();
    if (last_step - resolved_step > capacity) {
        fail("round: its last step is ", last_step, ", but with resolved_step = ", resolved_step,
             " and n_step_records = ", capacity, " allowed are steps up to ", resolved_step + capacity);
    }
}

bool StepRecords::resolve(int64_t last_step, const std::function<bool()>& trainer_gone) const {
    for (int64_t step = arena_.resolved_step(); step < last_step;) {
        const int64_t count_before = arena_.step_record(step).count;
        if (count_before < 0 || count_before == std::numeric_limits<int64_t>::max()) {
            fail("arena: step ", step, "'s count is ", count_before, ", allowed are numbers from 0");
        }
        ++step;
        StepRecord& record = arena_.step_record(step);
        if (!wait_for_word(record.word, step, trainer_gone)) return false;
        const bool applied = record.word.clip == record.word.clip;
        record.count = count_before + (applied ? 1 : 0);
        // The step is resolved with this and not before; a worker that takes over in between counts it again, from the same
        // count.
        std::atomic_signal_fence(std::memory_order_seq_cst);
        arena_.resolved_step() = step;
    }
    return true;
}

StepRecords::Step StepRecords::step(int64_t step) const {
    const StepRecord& record = arena_.step_record(step);
    if (sequence_of(record.word) != step) {
        fail("round: step ", step, " has been resolved, but its record now holds step ", sequence_of(record.word),
             "; n_step_records is ", arena_.header().n_step_records);
    }
    return {record.word.clip == record.word.clip, record.word.clip, record.count};
}

bool StepRecords::resolve_early(int64_t step, uint32_t block, const std::function<bool()>& trainer_gone) const {
    return resolve(step - 1, trainer_gone) && wait_for_word(arena_.block_word(block), step, trainer_gone);
}

StepRecords::Step StepRecords::early_step(int64_t step, uint32_t block) const {
    const float clip = arena_.block_word(block).clip;
    return {clip == clip, clip, arena_.step_record(step - 1).count + 1};
}

bool StepRecords::wait_for_word(const StepWord& word, int64_t step, const std::function<bool()>& trainer_gone) const {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (arrived(word, step)) return true;
        pause_briefly();
    }
    const auto deadline = steady_clock::now() + word_timeout_;
    auto next_trainer_check = steady_clock::now();
    microseconds sleep = kShortestSleep;
    while (!arrived(word, step)) {
        const auto now = steady_clock::now();
        if (now >= next_trainer_check) {
            if (trainer_gone()) return false;
            next_trainer_check = now + kTrainerCheckInterval;
        }
        if (now >= deadline) {
            fail("step ", step, "'s clip coefficient did not arrive within ", word_timeout_.count(), " ms");
        }
        std::this_thread::sleep_for(sleep);
        sleep = std::min(2 * sleep, kLongestSleep);
    }
    return true;
}

bool StepRecords::arrived(const StepWord& word, int64_t step) const {
    const int64_t sequence = sequence_of(word);
    if (sequence > step) {
        fail("round: step ", step, " has not been resolved, but its word already holds step ", sequence, "; n_step_records is ",
             arena_.header().n_step_records);
    }
    return sequence == step;
}

}  // namespace zenflow
