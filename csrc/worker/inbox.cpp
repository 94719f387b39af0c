#include "worker/inbox.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "common/error.h"

namespace zenflow {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

constexpr microseconds kShortestSleep{20};
constexpr microseconds kLongestSleep{200};

bool is_job(const Inbox::Received& message) { return message.type == MessageType::kJob; }

}  // namespace

Inbox::Inbox(const Arena& arena, Channel& channel, const StepRecords& records, const BlockReplay& replay,
             std::chrono::milliseconds word_timeout)
    : arena_(arena), channel_(channel), records_(records), replay_(replay), word_timeout_(word_timeout) {}

std::optional<Inbox::Received> Inbox::next() {
    if (!receive()) return std::nullopt;
    // Not before: the wait for a first message has no limit.
    auto deadline = steady_clock::now() + word_timeout_;
    int64_t resolved_step = arena_.live().resolved_step;
    microseconds sleep = kShortestSleep;
    do {
        if (const auto index = choose()) {
            records_.nothing_missing();
            Received message = std::move(waiting_[*index]);
            waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(*index));
            return message;
        }
        const auto now = steady_clock::now();
        if (arena_.live().resolved_step != resolved_step) deadline = now + word_timeout_;
        resolved_step = arena_.live().resolved_step;
        if (now >= deadline) fail_missing();
        std::this_thread::sleep_for(sleep);
        sleep = std::min(2 * sleep, kLongestSleep);
    } while (receive() && !channel_.trainer_gone());
    return std::nullopt;
}

void Inbox::fail_missing() const {
    const ArenaHeader& header = arena_.live();
    const int64_t timeout_ms = word_timeout_.count();
    require(header.awaited_step != 0, "job ", replay_.journal().job_in_progress(),
            ", which was begun, was not submitted again within ", timeout_ms, " ms");
    fail("step ", header.awaited_step, "'s clip coefficient did not arrive within ", timeout_ms, " ms",
         header.awaited_block == kNoBlock ? "" : ", for block " + std::to_string(header.awaited_block));
}

// Waits for a message if none waits here; receives all that are there if a newer one may come first. Returns false if the trainer
// is gone.
bool Inbox::receive() {
    const bool newest_first = arena_.header().newest_first != 0;
    while (waiting_.empty() || (newest_first && channel_.has_message())) {
        const auto message = channel_.receive();
        if (!message) return false;
        waiting_.push_back(parsed(*message));
        if (!is_job(waiting_.back())) continue;
        ZENFLOW_CHECK(waiting_.back().job.job_id > last_job_id_);
        last_job_id_ = waiting_.back().job.job_id;
    }
    return true;
}

Inbox::Received Inbox::parsed(const Channel::Message& message) const {
    Received received{static_cast<MessageType>(message.type), {}, {}, {}};
    if (received.type == MessageType::kTouch) {
        ZENFLOW_CHECK(message.size == sizeof(Touch));
        std::memcpy(&received.touch, message.data, sizeof(Touch));
    }
    if (received.type == MessageType::kTouch || received.type == MessageType::kExit) return received;
    ZENFLOW_CHECK(is_job(received) && message.size >= sizeof(UpdateJob));
    UpdateJob& job = received.job;
    std::memcpy(&job, message.data, sizeof(job));
    const uint64_t n_steps = n_steps_of(job);
    ZENFLOW_CHECK(message.size == sizeof(job) + n_steps * sizeof(uint32_t));
    const auto* const slots = reinterpret_cast<const uint32_t*>(message.data + sizeof(job));
    received.slots.assign(slots, slots + n_steps);
    replay_.check(job, received.slots.data());
    records_.check(job);
    return received;
}

// The message that is to be carried out now, if there is one.
std::optional<size_t> Inbox::choose() {
    const auto ready = [this](size_t index) {
        return replay_.journal().is_complete(waiting_[index].job) || records_.resolve(waiting_[index].job);
    };
    if (!is_job(waiting_.front())) return 0;
    if (arena_.header().newest_first == 0) return ready(0) ? std::optional<size_t>(0) : std::nullopt;
    first_.assign(arena_.blocks().size(), std::nullopt);
    size_t n_jobs = 0;
    for (; n_jobs < waiting_.size() && is_job(waiting_[n_jobs]); ++n_jobs) {
        const UpdateJob& job = waiting_[n_jobs].job;
        if (job.job_id == replay_.journal().job_in_progress()) return n_jobs;
        if (!first_[job.block]) first_[job.block] = n_jobs;
    }
    // What an earlier worker has begun is submitted again, and has to be completed first.
    if (replay_.journal().job_in_progress() != 0) return std::nullopt;
    // A block's first job is as urgent as its last one.
    for (size_t i = n_jobs; i-- > 0;) {
        std::optional<size_t>& first = first_[waiting_[i].job.block];
        if (first && ready(*first)) return first;
        first.reset();
    }
    return std::nullopt;
}

}  // namespace zenflow
