// What happened in each step: whether its data has arrived, its clip coefficient, and how many had been applied by then.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "arena.h"
#include "protocol.h"

namespace zenflow {

// The worker's side of the ring of step records. To be used by one thread, and only while a round is in flight.
class StepRecords {
  public:
    // `word_timeout` limits the wait for each step's word. The arena must outlive the object.
    StepRecords(const Arena& arena, std::chrono::milliseconds word_timeout);

    // Throws Error, naming field, value and what is allowed, if a round of these steps can never be served: its steps are no
    // numbers above 0, or more lie between the last resolved step and the round's last than the ring has room for.
    void check(int64_t first_step, uint32_t n_steps) const;

    // Resolves all steps before `step`, and waits for the block's word of `step` itself; the same promises and errors as
    // `resolve`.
    bool resolve_early(int64_t step, uint32_t block, const std::function<bool()>& trainer_gone) const;

    // Resolves the steps up to and including `last_step` that are not yet, in order: waits for each one's word, counts it if its
    // clip coefficient is not NaN, and stores the count in its record. On return everything the device wrote
    // before those words can be read. `trainer_gone` is asked every few milliseconds while waiting; once it says yes, the wait
    // ends with false. Throws Error if a word does not arrive in time, a later step has taken the record, or a count is none.
    bool resolve(int64_t last_step, const std::function<bool()>& trainer_gone) const;

    struct Step {
        bool applied;  // false: the clip coefficient is NaN and the step changes nothing
        float clip;
        int64_t count;  // number of applied steps up to and including this one
    };
    // A resolved step. Throws Error if its record has been taken by a later one.
    Step step(int64_t step) const;
    // A step in a block whose word has arrived, as if it were applied unless the block's clip coefficient is NaN.
    Step early_step(int64_t step, uint32_t block) const;

  private:
    bool wait_for_word(const StepWord& word, int64_t step, const std::function<bool()>& trainer_gone) const;
    // Whether the step's word has arrived; what was written before it can be read if so.
    bool arrived(const StepWord& word, int64_t step) const;

    const Arena& arena_;
    std::chrono::milliseconds word_timeout_;
};

}  // namespace zenflow
