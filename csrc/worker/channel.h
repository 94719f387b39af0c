// Messages between the worker and its trainer over a SOCK_SEQPACKET socket, which preserves their boundaries and their order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "common/protocol.h"

namespace zenflow {

// The worker's end of the socket. The file descriptor stays the caller's. Not thread-safe.
//
// Sending never blocks: what the socket has no room for is kept, and is sent while the channel waits for the next message. So
// both ends may send many messages without reading.
//
// The trainer is gone once its end is closed, which the kernel also does when the trainer dies.
class Channel {
  public:
    // Throws Error if `fd` is not a SOCK_SEQPACKET socket.
    explicit Channel(int fd);

    struct Message {
        const std::byte* data;  // the whole message, aligned to 8 bytes
        size_t size;
        uint32_t type;  // MessageType, unchecked
    };

    // Waits for the next message, which stays valid until the next call, and sends meanwhile what is kept. Returns nullopt if the
    // trainer is gone; its last messages may or may not be delivered first. Throws Error if the message has an invalid size or
    // the socket fails.
    std::optional<Message> receive();

    // Whether `receive` would return at once. Sends what is kept, as far as there is room.
    bool has_message();

    // Sends a structure. Returns false if the trainer is gone. Throws Error if the socket fails.
    template <typename T>
    bool send(const T& message) {
        static_assert(sizeof(T) <= kMaxMessageBytes, "the trainer reads no more");
        return send_bytes({reinterpret_cast<const char*>(&message), sizeof(message)});
    }

    // Sends an Error message, with the text truncated to fit, behind all that is kept; waits until the trainer has read enough.
    bool send_error(std::string_view text);

    // Whether the trainer is gone, even if messages of it are still queued. Does not block.
    bool trainer_gone() const;

  private:
    bool send_bytes(std::string message);
    // Sends what is kept, as far as there is room. Returns false if the trainer is gone.
    bool send_kept();
    // Waits until there is a message, or room for one.
    void wait_for(short events);

    int fd_;
    std::deque<std::string> kept_;
    alignas(8) std::array<std::byte, kMaxMessageBytes> buffer_;
};

}  // namespace zenflow
