#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "worker/channel.h"

namespace zenflow {
namespace {

// Both ends of a socket pair; the tests wrap the worker's in a Channel.
struct Pair {
    int trainer;
    int worker;

    Pair() {
        int ends[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
        trainer = ends[0];
        worker = ends[1];
    }
    ~Pair() {
        close_trainer();
        close(worker);
    }
    void close_trainer() {
        if (trainer >= 0) close(trainer);
        trainer = -1;
    }
};

// Whether the trainer left a message unread or the worker has not read one.
TEST(channel, death_of_the_trainer_is_visible_at_once) {
    Pair queued, unread;
    Channel channel(queued.worker), other(unread.worker);
    CHECK(!channel.trainer_gone());
    const MessageHeader message{};
    CHECK_EQ(send(queued.trainer, &message, sizeof(message), 0), ssize_t{8});
    CHECK(other.send(MessageHeader{}));
    queued.close_trainer();
    unread.close_trainer();
    CHECK(channel.trainer_gone());
    CHECK(!other.receive().has_value());
    CHECK(!other.send(MessageHeader{}));
}

TEST(channel, an_error_comes_behind_what_is_kept) {
    const Pair pair;
    Channel channel(pair.worker);
    constexpr uint32_t kMessages = 1000;
    for (uint32_t i = 0; i < kMessages; ++i) CHECK(channel.send(MessageHeader{i, 0}));
    std::thread worker([&channel] { CHECK(channel.send_error("why")); });
    std::vector<char> bytes(kMaxMessageBytes);
    for (uint32_t i = 0; i < kMessages; ++i) CHECK_EQ(recv(pair.trainer, bytes.data(), bytes.size(), 0), ssize_t{8});
    CHECK_EQ(recv(pair.trainer, bytes.data(), bytes.size(), 0), ssize_t{8 + 3});
    worker.join();
    // A longer text than a message has room for is cut off.
    CHECK(channel.send_error(std::string(2 * kMaxMessageBytes, 'x')));
    CHECK_EQ(recv(pair.trainer, bytes.data(), bytes.size(), MSG_TRUNC), static_cast<ssize_t>(kMaxMessageBytes));
}

}  // namespace
}  // namespace zenflow
