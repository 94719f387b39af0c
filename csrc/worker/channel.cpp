#include "worker/channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "common/error.h"

namespace zenflow {

Channel::Channel(int fd) : fd_(fd) {
    int type = 0;
    socklen_t size = sizeof(type);
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0) fail("socket: ", std::strerror(errno));
    ZENFLOW_CHECK(type == SOCK_SEQPACKET);
}

std::optional<Channel::Message> Channel::receive() {
    ssize_t size;
    do {
        if (!kept_.empty()) {
            wait_for(POLLIN | POLLOUT);
            if (!send_kept()) return std::nullopt;
        }
        // With MSG_TRUNC the result is the real length of the message, even if it did not fit.
        size = recv(fd_, buffer_.data(), buffer_.size(), MSG_TRUNC | (kept_.empty() ? 0 : MSG_DONTWAIT));
    } while (size < 0 && (errno == EINTR || errno == EAGAIN));
    // A trainer that died with unread messages resets the connection.
    if (size == 0 || (size < 0 && errno == ECONNRESET)) return std::nullopt;
    if (size < 0) fail("cannot receive from the trainer: ", std::strerror(errno));
    Message message{buffer_.data(), static_cast<size_t>(size), 0};
    ZENFLOW_CHECK(message.size >= sizeof(MessageHeader) && message.size <= kMaxMessageBytes);
    std::memcpy(&message.type, buffer_.data() + offsetof(MessageHeader, type), sizeof(message.type));
    return message;
}

bool Channel::has_message() {
    if (!send_kept()) return true;
    pollfd state{fd_, POLLIN, 0};
    return poll(&state, 1, 0) > 0;
}

bool Channel::send_bytes(std::string message) {
    kept_.push_back(std::move(message));
    return send_kept();
}

bool Channel::send_kept() {
    while (!kept_.empty()) {
        const std::string& message = kept_.front();
        if (::send(fd_, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) {
            kept_.pop_front();
        } else if (errno != EINTR) {
            if (errno == EAGAIN) return true;
            if (errno == EPIPE || errno == ECONNRESET) return false;
            fail("cannot send to the trainer: ", std::strerror(errno));
        }
    }
    return true;
}

bool Channel::send_error(std::string_view text) {
    const MessageHeader header{static_cast<uint32_t>(MessageType::kError), 0};
    std::string message(reinterpret_cast<const char*>(&header), sizeof(header));
    bool sent = send_bytes(message.append(text.substr(0, kMaxMessageBytes - sizeof(header))));
    while (sent && !kept_.empty()) {
        wait_for(POLLOUT);
        sent = send_kept();
    }
    return sent;
}

void Channel::wait_for(short events) {
    pollfd state{fd_, events, 0};
    // An interrupted wait is repeated by the caller's loop.
    if (poll(&state, 1, -1) < 0 && errno != EINTR) fail("cannot wait for the trainer: ", std::strerror(errno));
}

bool Channel::trainer_gone() const {
    pollfd state{fd_, 0, 0};
    return poll(&state, 1, 0) > 0 && (state.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0;
}

}  // namespace zenflow
