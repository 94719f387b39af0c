#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "worker/channel.h"

namespace zenflow {
namespace {

using test::error_of;

// Both ends of a socket pair; the tests wrap the worker's in a Channel.
struct Pair {
    int trainer;
    int worker;

    explicit Pair(int type = SOCK_SEQPACKET) {
        int ends[2];
        CHECK_EQ(socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends), 0);
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
    void send(const std::vector<char>& bytes) const {
        CHECK_EQ(::send(trainer, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    }
};

TEST(channel, rejects_messages_of_invalid_size) {
    const Pair pair;
    Channel channel(pair.worker);
    pair.send(std::vector<char>(kMaxMessageBytes + 1));
    CHECK_CONTAINS(error_of([&channel] { channel.receive(); }), "got 16385");
    pair.send(std::vector<char>(4));
    CHECK_CONTAINS(error_of([&channel] { channel.receive(); }), "got 4");
    // A longer text is cut off.
    CHECK(channel.send_error(std::string(2 * kMaxMessageBytes, 'x')));
    std::vector<char> buffer(kMaxMessageBytes);
    CHECK_EQ(recv(pair.trainer, buffer.data(), buffer.size(), MSG_TRUNC), static_cast<ssize_t>(kMaxMessageBytes));
}

// Whether the trainer left a message unread or the worker has not read one.
TEST(channel, death_of_the_trainer_is_visible_at_once) {
    Pair queued, unread;
    Channel channel(queued.worker), other(unread.worker);
    CHECK(!channel.trainer_gone());
    queued.send(std::vector<char>(64));
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
}

TEST(channel, rejects_other_files) {
    CHECK_CONTAINS(error_of([] { const Channel channel(9999); }), "--socket-fd must be an open socket, got 9999");
    const Pair stream(SOCK_STREAM);
    CHECK_CONTAINS(error_of([&stream] { const Channel channel(stream.worker); }), "must be a SOCK_SEQPACKET socket");
}

}  // namespace
}  // namespace zenflow
