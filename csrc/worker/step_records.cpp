#include "worker/step_records.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/error.h"
#include "common/half.h"

namespace zenflow {
namespace {

// Acquires what was written before the sequence number.
int64_t sequence_of(const StepWord& word) { return __atomic_load_n(&word.sequence, __ATOMIC_ACQUIRE); }

}  // namespace

uint32_t check_of(float clip, int64_t sequence) { return float_bits(clip) ^ static_cast<uint32_t>(sequence); }

void StepRecords::check(const UpdateJob& job) const {
    const auto n_steps = static_cast<int64_t>(n_steps_of(job));
    if (n_steps == 0) return;
    const int64_t capacity = arena_.header().n_step_records;
    ZENFLOW_CHECK(n_steps <= capacity);
    ZENFLOW_CHECK(job.first_step >= 1 && job.first_step <= std::numeric_limits<int64_t>::max() - n_steps);
    // Of a broken arena any number.
    const int64_t resolved_step = std::min(arena_.live().resolved_step, std::numeric_limits<int64_t>::max() - capacity);
    ZENFLOW_CHECK(job.first_step + n_steps - 1 <= resolved_step + capacity);
}

bool StepRecords::resolve(const UpdateJob& job) const {
    if (n_steps_of(job) == 0) return true;
    const int64_t tentative_step = job.first_step + job.n_committed;
    const int64_t last = tentative_step - (job.tentative == Tentative::kCorrection ? 0 : 1);
    for (int64_t step = arena_.live().resolved_step; step < last;) {
        const int64_t count_before = arena_.step_record(step).count;
        ZENFLOW_CHECK(count_before >= 0 && count_before < std::numeric_limits<int64_t>::max());
        ++step;
        StepRecord& record = arena_.step_record(step);
        const std::optional<float> clip = arrived(record.word, step);
        if (!clip) return note_missing(step, kNoBlock);
        record.count = count_before + (std::isfinite(*clip) ? 1 : 0);
        // Makes the step resolved: no earlier store may come after this one. A worker that restarts before it counts the step
        // again, from the same count.
        __atomic_store_n(&arena_.live().resolved_step, step, __ATOMIC_RELEASE);
    }
    if (job.tentative == Tentative::kNone || job.tentative == Tentative::kCorrection) return true;
    return arrived(arena_.block_word(job.block), tentative_step) || note_missing(tentative_step, job.block);
}

StepRecords::Step StepRecords::committed_step(const UpdateJob& job, uint32_t index) const {
    const int64_t step = job.first_step + index;
    const StepRecord& record = arena_.step_record(step);
    ZENFLOW_CHECK(sequence_of(record.word) == step);
    return {record.word.clip, record.count};
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
    return {shown.factor, arena_.step_record(step_before).count + 1};
}

bool StepRecords::note_missing(int64_t step, uint32_t block) const {
    ArenaHeader& header = arena_.live();
    __atomic_store_n(&header.awaited_block, block, __ATOMIC_RELAXED);
    __atomic_store_n(&header.awaited_step, step, __ATOMIC_RELAXED);
    __atomic_store_n(&header.n_looks, header.n_looks + 1, __ATOMIC_RELAXED);
    return false;
}

void StepRecords::nothing_missing() const { __atomic_store_n(&arena_.live().awaited_step, int64_t{0}, __ATOMIC_RELAXED); }

std::optional<float> StepRecords::arrived(const StepWord& word, int64_t step) const {
    const int64_t sequence = sequence_of(word);
    ZENFLOW_CHECK(sequence <= step);
    if (sequence != step) return std::nullopt;
    float clip;
    uint32_t check;
    __atomic_load(&word.clip, &clip, __ATOMIC_RELAXED);
    __atomic_load(&word.check, &check, __ATOMIC_RELAXED);
    if (check != check_of(clip, sequence)) return std::nullopt;
    return clip;
}

}  // namespace zenflow
