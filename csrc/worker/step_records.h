// The worker's side of the ring of step records: arrival of each step's data, its clip coefficient, the count of applied steps.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "common/protocol.h"
#include "worker/arena.h"

namespace zenflow {

// `StepWord::check` of a word.
uint32_t check_of(float clip, int64_t sequence);

// Not thread-safe, and to be used only while a job is in flight. The arena must outlive the object.
class StepRecords {
  public:
    // `word_timeout` limits the wait for each step's word.
    StepRecords(const Arena& arena, std::chrono::milliseconds word_timeout);

    // Throws Error if the job's steps are not positive, or if more of them are unresolved than the ring has records.
    void check(const UpdateJob& job) const;

    // Resolves the job's steps: waits for the word of each step before the tentative one, of a kCorrection job for that one's
    // too, that is not resolved yet, in order, counts it if its factor is finite, and stores the count in its record. Then waits
    // for the block's word, if the tentative part needs it. All that the device wrote before those words happens before the
    // return. Calls `trainer_gone` every few milliseconds; once it returns true, the result is false. Throws Error if a word does
    // not arrive in time, a later step has overwritten the record, or a count is invalid.
    bool resolve(const UpdateJob& job, const std::function<bool()>& trainer_gone) const;

    // As `resolve`, of what has arrived. Returns whether that is all, and if not, notes the missing word; never waits.
    bool resolve_arrived(const UpdateJob& job) const;

    // Notes in the header that no word is missing.
    void nothing_missing() const;

    struct Step {
        bool applied;  // false: the factor is not finite and the step is left out
        float clip;
        int64_t count;  // applied steps up to and including this one
    };
    // One of a resolved job's committed steps. Throws Error if a later step has overwritten the record.
    Step committed_step(const UpdateJob& job, uint32_t index) const;

    // How a resolved job with a tentative part shows it if it begins now. Throws as `committed_step`.
    BlockShown to_show(const UpdateJob& job) const;

    // The tentative step that a resolved job shows so.
    Step tentative_step(const UpdateJob& job, const BlockShown& shown) const;

  private:
    struct Awaited {
        const StepWord& word;
        int64_t step;
        uint32_t block;  // kNoBlock: the word is the step's
    };
    // `take` returns the factor of a word, or nothing, which ends the loop.
    using Take = std::function<std::optional<float>(const Awaited& awaited)>;
    bool resolve_with(const UpdateJob& job, const Take& take) const;
    // The word's factor once the whole word has arrived; nothing if the trainer is gone, or if it has not arrived yet.
    std::optional<float> wait_for_word(const Awaited& awaited, const std::function<bool()>& trainer_gone) const;
    // Notes a look at a missing word in the header.
    void note_missing(const Awaited& awaited) const;
    std::optional<float> arrived(const StepWord& word, int64_t step) const;

    const Arena& arena_;
    std::chrono::milliseconds word_timeout_;
};

}  // namespace zenflow
