#include "worker/step_records.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>

#include "common/error.h"

namespace zenflow {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kSpins = 1000;  // about 20 to 50 us
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

// Acquires what was written before the sequence number.
int64_t sequence_of(const StepWord& word) { return __atomic_load_n(&word.sequence, __ATOMIC_ACQUIRE); }

}  // namespace

uint32_t check_of(float clip, int64_t sequence) {
    uint32_t bits;
    std::memcpy(&bits, &clip, sizeof(bits));
    return bits ^ static_cast<uint32_t>(sequence);
}

StepRecords::StepRecords(const Arena& arena, milliseconds word_timeout) : arena_(arena), word_timeout_(word_timeout) {}

void StepRecords::check(const UpdateJob& job) const {
    const auto n_steps = static_cast<int64_t>(n_steps_of(job));
    if (n_steps == 0) return;
    const int64_t capacity = arena_.header().n_step_records;
    require(n_steps <= capacity, "job: the number of its steps must be at most n_step_records = ", capacity, ", got ", n_steps);
    require(job.first_step >= 1 && job.first_step <= std::numeric_limits<int64_t>::max() - n_steps,
            "job: first_step must be at least 1 and its sum with the number of steps representable, got ", job.first_step);
    const int64_t last_step = job.first_step + n_steps - 1;
    const int64_t resolved_step = arena_.resolved_step();
    // Of a broken arena any number.
    const int64_t largest = std::min(resolved_step, std::numeric_limits<int64_t>::max() - capacity) + capacity;
    require(last_step <= largest, "job: its last step must be at most ", largest, " with resolved_step = ", resolved_step,
            " and n_step_records = ", capacity, ", got ", last_step);
}

bool StepRecords::resolve(const UpdateJob& job, const std::function<bool()>& trainer_gone) const {
    return resolve_with(job, [&](const Awaited& awaited) { return wait_for_word(awaited, trainer_gone); });
}

bool StepRecords::resolve_arrived(const UpdateJob& job) const {
    return resolve_with(job, [&](const Awaited& awaited) {
        const auto clip = arrived(awaited.word, awaited.step);
        if (!clip) note_missing(awaited);
        return clip;
    });
}

bool StepRecords::resolve_with(const UpdateJob& job, const Take& take) const {
    if (n_steps_of(job) == 0) return true;
    const int64_t tentative_step = job.first_step + job.n_committed;
    const int64_t last = tentative_step - (job.tentative == Tentative::kCorrection ? 0 : 1);
    for (int64_t step = arena_.resolved_step(); step < last;) {
        const int64_t count_before = arena_.step_record(step).count;
        require(count_before >= 0 && count_before < std::numeric_limits<int64_t>::max(), "arena: step ", step,
                "'s count must be at least 0, got ", count_before);
        ++step;
        StepRecord& record = arena_.step_record(step);
        const std::optional<float> clip = take({record.word, step, kNoBlock});
        if (!clip) return false;
        record.count = count_before + (std::isfinite(*clip) ? 1 : 0);
        // Makes the step resolved: no earlier store may come after this one. A worker that restarts before it counts the step
        // again, from the same count.
        __atomic_store_n(&arena_.resolved_step(), step, __ATOMIC_RELEASE);
    }
    if (job.tentative == Tentative::kNone || job.tentative == Tentative::kCorrection) return true;
    return take({arena_.block_word(job.block), tentative_step, job.block}).has_value();
}

StepRecords::Step StepRecords::committed_step(const UpdateJob& job, uint32_t index) const {
    const int64_t step = job.first_step + index;
    const StepRecord& record = arena_.step_record(step);
    const int64_t sequence = sequence_of(record.word);
    require(sequence == step, "job: the record of resolved step ", step, " must still hold it, got step ", sequence,
            "; n_step_records is ", arena_.header().n_step_records);
    return {std::isfinite(record.word.clip), record.word.clip, record.count};
}

BlockShown StepRecords::to_show(const UpdateJob& job) const {
    const int64_t step = job.first_step + job.n_committed;
    std::optional<float> true_factor;
    if (job.tentative == Tentative::kCorrection) true_factor = committed_step(job, 0).clip;
    if (job.tentative == Tentative::kTrueIfKnown) true_factor = arrived(arena_.step_record(step).word, step);
    return {step, true_factor.value_or(arena_.block_word(job.block).clip), true_factor ? 1u : 0u};
}

StepRecords::Step StepRecords::tentative_step(const UpdateJob& job, const BlockShown& shown) const {
    const int64_t step_before = job.first_step + job.n_committed - 1;
    return {std::isfinite(shown.factor), shown.factor, arena_.step_record(step_before).count + 1};
}

void StepRecords::note_missing(const Awaited& awaited) const {
    ArenaHeader& header = *arena_.at<ArenaHeader>(0);
    __atomic_store_n(&header.awaited_block, awaited.block, __ATOMIC_RELAXED);
    __atomic_store_n(&header.awaited_step, awaited.step, __ATOMIC_RELAXED);
    __atomic_store_n(&header.n_looks, header.n_looks + 1, __ATOMIC_RELAXED);
}

void StepRecords::nothing_missing() const {
    __atomic_store_n(&arena_.at<ArenaHeader>(0)->awaited_step, int64_t{0}, __ATOMIC_RELAXED);
}

std::optional<float> StepRecords::wait_for_word(const Awaited& awaited, const std::function<bool()>& trainer_gone) const {
    const auto& [word, step, block] = awaited;
    for (int spin = 0; spin < kSpins; ++spin) {
        if (const auto clip = arrived(word, step)) return clip;
        pause_briefly();
    }
    const auto deadline = steady_clock::now() + word_timeout_;
    auto next_trainer_check = steady_clock::now();
    microseconds sleep = kShortestSleep;
    while (true) {
        if (const auto clip = arrived(word, step)) {
            nothing_missing();
            return clip;
        }
        note_missing(awaited);
        const auto now = steady_clock::now();
        if (now >= next_trainer_check) {
            if (trainer_gone()) return std::nullopt;
            next_trainer_check = now + kTrainerCheckInterval;
        }
        require(now < deadline, "step ", step, "'s clip coefficient did not arrive within ", word_timeout_.count(), " ms",
                block == kNoBlock ? "" : ", for block " + std::to_string(block));
        std::this_thread::sleep_for(sleep);
        sleep = std::min(2 * sleep, kLongestSleep);
    }
}

std::optional<float> StepRecords::arrived(const StepWord& word, int64_t step) const {
    const int64_t sequence = sequence_of(word);
    require(sequence <= step, "job: the word of unresolved step ", step, " must not hold a later one, got step ", sequence,
            "; n_step_records is ", arena_.header().n_step_records);
    if (sequence != step) return std::nullopt;
    float clip;
    uint32_t check;
    __atomic_load(&word.clip, &clip, __ATOMIC_RELAXED);
    __atomic_load(&word.check, &check, __ATOMIC_RELAXED);
    if (check != check_of(clip, sequence)) return std::nullopt;
    return clip;
}

}  // namespace zenflow
