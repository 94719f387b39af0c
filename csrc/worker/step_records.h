// The worker's side of the ring of step records: arrival of each step's data, its clip coefficient, the count of applied steps.
#pragma once

#include <cstdint>
#include <optional>

#include "common/protocol.h"
#include "worker/arena.h"

namespace zenflow {

// `StepWord::check` of a word.
uint32_t check_of(float clip, int64_t sequence);

// Not thread-safe, and to be used only while a job is in flight. The arena must outlive the object.
class StepRecords {
  public:
    explicit StepRecords(const Arena& arena) : arena_(arena) {}

    // Throws Error if the job's steps are not positive, or if more of them are unresolved than the ring has records.
    void check(const UpdateJob& job) const;

    // Resolves the job's steps as far as their words have arrived: of each step before the tentative one, of a kCorrection job of
    // that one too, that is not resolved yet, in order, counts it if its factor is finite, and stores the count in its record.
    // Returns whether all words are there, the block's included if the tentative part needs it; all that the device wrote before
    // them happens before the return. If not, notes the missing word in the header. Never waits. Throws Error if a later step has
    // overwritten the record, or a count is invalid.
    bool resolve(const UpdateJob& job) const;

    // Notes in the header that no word is missing.
    void nothing_missing() const;

    struct Step {
        float clip;     // not finite: the step is left out
        int64_t count;  // applied steps up to and including this one
    };
    // One of a resolved job's committed steps. Throws Error if a later step has overwritten the record.
    Step committed_step(const UpdateJob& job, uint32_t index) const;

    // How a resolved job with a tentative part shows it if it begins now. Throws as `committed_step`.
    BlockShown to_show(const UpdateJob& job) const;

    // The tentative step that a resolved job shows so.
    Step tentative_step(const UpdateJob& job, const BlockShown& shown) const;

  private:
    // Notes a look at the missing word of a step, or of a block unless it is kNoBlock. Returns false.
    bool note_missing(int64_t step, uint32_t block) const;
    // The word's factor, if the whole word has arrived.
    std::optional<float> arrived(const StepWord& word, int64_t step) const;

    const Arena& arena_;
};

}  // namespace zenflow
