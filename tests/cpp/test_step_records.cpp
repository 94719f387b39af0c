#include <atomic>
#include <thread>

#include "check.h"
#include "trainer.h"
#include "worker/step_records.h"

namespace zenflow {
namespace {

// The device writes through the worker's own mapping, so that ThreadSanitizer sees the same addresses.
TEST(step_records, a_late_word_acquires_earlier_writes) {
    test::TrainerArena trainer("empty");
    const StepRecords records(trainer);
    const UpdateJob job{static_cast<uint32_t>(MessageType::kJob), 0, 1, 2, 1, 0, 0.0f, Tentative::kNone};
    std::atomic<bool> waiting{false};
    std::thread device([&] {
        while (!waiting) std::this_thread::yield();
        for (int64_t step = 1; step <= 2; ++step) {
            trainer.master()[step] = static_cast<float>(step);
            trainer.write_word(step, 0.5f);
        }
    });
    while (!records.resolve(job)) waiting = true;
    CHECK_EQ(trainer.master()[1], 1.0f);
    CHECK_EQ(trainer.master()[2], 2.0f);
    CHECK_EQ(records.committed_step(job, 0).clip, 0.5f);
    device.join();
}

}  // namespace
}  // namespace zenflow
