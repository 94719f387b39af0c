// Parts of the worker, in this process. The argument is a file with an arena without steps, as test_cpp.py makes it.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "common/error.h"
#include "worker/arena.h"
#include "worker/channel.h"
#include "worker/step_records.h"

namespace zenflow {
namespace {

// As the device does, the sequence number last, with release semantics.
void write_word(StepWord& word, int64_t step, float clip) {
    word.clip = clip;
    word.check = check_of(clip, step);
    __atomic_store_n(&word.sequence, step, __ATOMIC_RELEASE);
}

// The device writes through the worker's own mapping, so that ThreadSanitizer sees the same addresses.
void a_late_word_acquires_earlier_writes(const char* file) {
    const Arena arena(open(file, O_RDWR | O_CLOEXEC));
    const StepRecords records(arena);
    const UpdateJob job{static_cast<uint32_t>(MessageType::kJob), 0, 1, 2, 1, 0, 0.0f, Tentative::kNone};
    std::atomic<bool> waiting{false};
    std::thread device([&] {
        while (!waiting) std::this_thread::yield();
        for (int64_t step = 1; step <= 2; ++step) {
            arena.master()[step] = static_cast<float>(step);
            write_word(arena.step_record(step).word, step, 0.5f);
        }
    });
    while (!records.resolve(job)) waiting = true;
    ZENFLOW_CHECK(arena.master()[1] == 1.0f && arena.master()[2] == 2.0f);
    ZENFLOW_CHECK(records.committed_step(job, 0).clip == 0.5f);
    device.join();
}

void a_text_longer_than_a_message_is_cut() {
    int ends[2];
    ZENFLOW_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    ZENFLOW_CHECK(Channel(ends[0]).send_error(std::string(kMaxMessageBytes, 'x')));
    ZENFLOW_CHECK(recv(ends[1], nullptr, 0, MSG_TRUNC) == ssize_t{kMaxMessageBytes});
    for (const int end : ends) close(end);
}

}  // namespace
}  // namespace zenflow

int main(int, char** argv) {
    zenflow::a_late_word_acquires_earlier_writes(argv[1]);
    zenflow::a_text_longer_than_a_message_is_cut();
}
