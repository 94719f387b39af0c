// Messages between the worker and its trainer over a SOCK_SEQPACKET socket, which keeps their boundaries and their order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "protocol.h"

namespace zenflow {

// One end of the socket. The file descriptor stays the caller's. To be used by one thread.
//
// The trainer counts as gone once its end is closed, which the kernel does when it dies in whatever way.
class Channel {
  public:
    // Throws Error if `fd` is not a SOCK_SEQPACKET socket.
    explicit Channel(int fd);

    struct Message {
        const std::byte* data;  // the whole message, aligned to 8 bytes
        size_t size;
        uint32_t type;  // MessageType, unchecked
    };

    // Waits for the next message; its content stays valid until the next call. Returns nothing if the trainer is gone; messages
    // it sent before may still be delivered first, or not. Throws Error if the message is longer than kMaxMessageBytes or too
    // short to hold a type, or if the socket fails.
    std::optional<Message> receive();

    // Sends a structure and, behind it in the same message, entries of a table. Returns false if the trainer is gone. Throws
    // Error if the socket fails.
    template <typename T>
    bool send(const T& message) {
        return send_bytes(&message, sizeof(message), nullptr, 0);
    }
    template <typename T, typename Entry>
    bool send(const T& message, const Entry* entries, size_t n_entries) {
        return send_bytes(&message, sizeof(message), entries, n_entries * sizeof(Entry));
    }

    // Sends an Error message, with the end of the text cut off where it does not fit.
    bool send_error(std::string_view text);

    // Whether the trainer is gone, even while messages of it are still waiting. Never waits.
    bool trainer_gone() const;

  private:
    bool send_bytes(const void* head, size_t head_size, const void* tail, size_t tail_size);

    int fd_;
    alignas(8) std::array<std::byte, kMaxMessageBytes> buffer_;
};

}  // namespace zenflow
