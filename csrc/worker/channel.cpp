#include "worker/channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/error.h"

namespace zenflow {

Channel::Channel(int fd) : fd_(fd) {
    int type = 0;
    socklen_t size = sizeof(type);
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0) {
        fail("--socket-fd must be an open socket, got ", fd, ": ", std::strerror(errno));
    }
    require(type == SOCK_SEQPACKET, "--socket-fd must be a SOCK_SEQPACKET socket, got type ", type);
}

std::optional<Channel::Message> Channel::receive() {
    ssize_t size;
    do {
        // With MSG_TRUNC the result is the real length of the message, even if it did not fit.
        size = recv(fd_, buffer_.data(), buffer_.size(), MSG_TRUNC);
    } while (size < 0 && errno == EINTR);
    // A trainer that died with unread messages resets the connection.
    if (size == 0 || (size < 0 && errno == ECONNRESET)) return std::nullopt;
    if (size < 0) fail("cannot receive from the trainer: ", std::strerror(errno));
    Message message{buffer_.data(), static_cast<size_t>(size), 0};
    require(message.size >= sizeof(MessageHeader) && message.size <= kMaxMessageBytes, "message: size must be from ",
            sizeof(MessageHeader), " to ", kMaxMessageBytes, " bytes, got ", size);
    std::memcpy(&message.type, buffer_.data() + offsetof(MessageHeader, type), sizeof(message.type));
    return message;
}

bool Channel::send_bytes(const void* head, size_t head_size, const void* tail, size_t tail_size) {
    // Only read; iovec has no const because it also serves for receiving.
    iovec parts[] = {{const_cast<void*>(head), head_size}, {const_cast<void*>(tail), tail_size}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    ssize_t sent;
    do {
        sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) return false;
    if (sent < 0) fail("cannot send to the trainer: ", std::strerror(errno));
    return true;
}

bool Channel::send_error(std::string_view text) {
    const MessageHeader header{static_cast<uint32_t>(MessageType::kError), 0};
    return send(header, text.data(), std::min(text.size(), kMaxMessageBytes - sizeof(header)));
}

bool Channel::trainer_gone() const {
    pollfd state{fd_, 0, 0};
    return poll(&state, 1, 0) > 0 && (state.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0;
}

}  // namespace zenflow
