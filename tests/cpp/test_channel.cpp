#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
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

std::vector<char> message_of(uint32_t type, size_t size) {
    std::vector<char> bytes(size, static_cast<char>(type));
    std::memcpy(bytes.data(), &type, sizeof(type));
    return bytes;
}

TEST(channel, keeps_message_boundaries_and_order) {
    const Pair pair;
    Channel channel(pair.worker);
    const size_t sizes[] = {sizeof(MessageHeader), 100, kMaxMessageBytes, sizeof(UpdateJob)};
    for (uint32_t i = 0; i < 4; ++i) pair.send(message_of(i, sizes[i]));
    for (uint32_t i = 0; i < 4; ++i) {
        const auto message = channel.receive();
        CHECK(message.has_value());
        CHECK_EQ(message->type, i);
        CHECK_EQ(message->size, sizes[i]);
        CHECK_EQ(std::memcmp(message->data, message_of(i, sizes[i]).data(), sizes[i]), 0);
    }
}

TEST(channel, rejects_messages_of_invalid_size) {
    const Pair pair;
    Channel channel(pair.worker);
    pair.send(message_of(1, kMaxMessageBytes + 1));
    CHECK_CONTAINS(error_of([&channel] { channel.receive(); }), "got 16385");
    pair.send(message_of(1, 4));
    CHECK_CONTAINS(error_of([&channel] { channel.receive(); }), "got 4");
    // A longer text is cut off.
    CHECK(channel.send_error(std::string(2 * kMaxMessageBytes, 'x')));
    std::vector<char> buffer(kMaxMessageBytes);
    CHECK_EQ(recv(pair.trainer, buffer.data(), buffer.size(), MSG_TRUNC), static_cast<ssize_t>(kMaxMessageBytes));
}

TEST(channel, end_of_stream_is_not_a_message) {
    Pair pair;
    Channel channel(pair.worker);
    CHECK(!channel.trainer_gone());
    std::thread trainer([&pair] { pair.close_trainer(); });
    CHECK(!channel.receive().has_value());
    trainer.join();
    CHECK(channel.trainer_gone());
    CHECK(!channel.send(MessageHeader{}));
}

// Whether the trainer left a message unread or the worker has not read one.
TEST(channel, death_of_the_trainer_is_visible_at_once) {
    Pair queued, unread;
    Channel channel(queued.worker), other(unread.worker);
    queued.send(message_of(1, 64));
    CHECK(other.send(MessageHeader{}));
    queued.close_trainer();
    unread.close_trainer();
    CHECK(channel.trainer_gone());
    CHECK(!other.receive().has_value());
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
