// The messages that the worker has received and not carried out, and the choice of the next one.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "common/protocol.h"
#include "worker/arena.h"
#include "worker/block_replay.h"
#include "worker/channel.h"
#include "worker/step_records.h"

namespace zenflow {

// Not thread-safe; all that it is given must outlive it.
class Inbox {
  public:
    struct Received {
        MessageType type;             // kJob, kTouch or kExit
        UpdateJob job;                // checked, if it is one
        std::vector<uint32_t> slots;  // one for each of the job's steps
        Touch touch;                  // if it is one
    };

    // `word_timeout` limits the wait while messages are there and none of the steps' words that their jobs wait for arrives.
    Inbox(const Arena& arena, Channel& channel, const StepRecords& records, const BlockReplay& replay,
          std::chrono::milliseconds word_timeout);

    // Waits for the next message that is to be carried out, in the order that protocol.h describes, and for the words of a job,
    // whose steps are resolved then. Returns nothing if the trainer is gone. Throws Error if a message is invalid, or the words
    // do not arrive in time.
    std::optional<Received> next();

  private:
    bool receive();
    Received parsed(const Channel::Message& message) const;
    std::optional<size_t> choose();
    [[noreturn]] void fail_missing() const;

    const Arena& arena_;
    Channel& channel_;
    const StepRecords& records_;
    const BlockReplay& replay_;
    const std::chrono::milliseconds word_timeout_;
    int64_t last_job_id_ = 0;
    std::deque<Received> waiting_;              // in the order of their receipt
    std::vector<std::optional<size_t>> first_;  // a member so that its memory is reused: each block's first job of `waiting_`
};

}  // namespace zenflow
