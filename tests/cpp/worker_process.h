// The worker executable, started as the trainer starts it.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "common/protocol.h"
#include "trainer_arena.h"

namespace zenflow::test {

// The usable logical cores, or the first of them, as an argument of --cores.
inline std::string all_cores() {
    cpu_set_t set;
    CHECK_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
    std::string cores;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core, &set)) cores += (cores.empty() ? "" : ",") + std::to_string(core);
    }
    return cores;
}

inline std::string first_core() {
    const std::string cores = all_cores();
    return cores.substr(0, cores.find(','));
}

// Owns the process, which it kills on destruction, and the trainer's end of the socket.
class WorkerProcess {
  public:
    // Nothing receives its output: tests read errors from the messages.
    WorkerProcess(const TrainerArena& arena, const std::string& cores, int word_timeout_ms = 600000) {
        int ends[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
        socket_ = ends[0];
        const timeval limit{kReceiveTimeoutS, 0};
        CHECK_EQ(setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
        std::string arguments[] = {ZENFLOW_WORKER, std::to_string(arena.fd()), std::to_string(ends[1]), cores,
                                   std::to_string(word_timeout_ms)};
        std::vector<char*> argv;
        for (std::string& argument : arguments) argv.push_back(argument.data());
        argv.push_back(nullptr);
        const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
        pid_ = fork();
        CHECK(pid_ >= 0);
        if (pid_ == 0) {
            for (const int fd : {arena.fd(), ends[1]}) fcntl(fd, F_SETFD, 0);
            for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) dup2(null, stream);
            execv(ZENFLOW_WORKER, argv.data());
            _exit(127);
        }
        close(null);
        close(ends[1]);
    }
    ~WorkerProcess() {
        close_socket();
        if (pid_ > 0) {
            kill(pid_, SIGKILL);
            waitpid(pid_, nullptr, 0);
        }
    }
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;

    template <typename T>
    void send(const T& message) {
        send(&message, sizeof(message));
    }
    void send(const void* data, size_t size) { CHECK_EQ(::send(socket_, data, size, MSG_NOSIGNAL), static_cast<ssize_t>(size)); }
    void submit(const UpdateJob& job, const std::vector<uint32_t>& slots) {
        std::string message(reinterpret_cast<const char*>(&job), sizeof(job));
        message.append(reinterpret_cast<const char*>(slots.data()), slots.size() * sizeof(uint32_t));
        send(message.data(), message.size());
    }
    void signal(int number) { CHECK_EQ(kill(pid_, number), 0); }
    pid_t pid() const { return pid_; }

    // Bytes of messages that have not been received yet.
    size_t bytes_waiting() const {
        int bytes = 0;
        CHECK_EQ(ioctl(socket_, FIONREAD, &bytes), 0);
        return static_cast<size_t>(bytes);
    }

    // Wait for the next message, which must be of this type. The text of an unexpected Error message becomes the failure's.
    Ready receive_ready() { return message_as<Ready>(receive(), MessageType::kReady); }
    Done receive_done() { return message_as<Done>(receive(), MessageType::kDone); }
    Acknowledged receive_acknowledged() { return message_as<Acknowledged>(receive(), MessageType::kAcknowledged); }

    // As the death of the trainer does.
    void close_socket() {
        if (socket_ >= 0) close(socket_);
        socket_ = -1;
    }

    // Waits for the exit and returns its status, or minus the number of the signal that killed the process.
    int wait() {
        int status = 0;
        CHECK(waitpid(std::exchange(pid_, -1), &status, 0) > 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }

  private:
    static constexpr int kReceiveTimeoutS = 120;  // of any message; builds with sanitizers are slow

    std::string receive() {
        std::string message(kMaxMessageBytes, '\0');
        const ssize_t size = recv(socket_, message.data(), message.size(), 0);
        if (size < 0 && errno == EAGAIN) {
            throw CheckFailed("the worker sent nothing for " + std::to_string(kReceiveTimeoutS) + " s");
        }
        if (size <= 0) throw CheckFailed("the worker ended without a message");
        message.resize(static_cast<size_t>(size));
        return message;
    }

    template <typename T>
    static T message_as(const std::string& message, MessageType type) {
        uint32_t actual = 0;
        CHECK(message.size() >= sizeof(actual));
        std::memcpy(&actual, message.data(), sizeof(actual));
        if (actual == static_cast<uint32_t>(MessageType::kError) && type != MessageType::kError) {
            throw CheckFailed("the worker failed: " + message.substr(sizeof(MessageHeader)));
        }
        CHECK_EQ(actual, static_cast<uint32_t>(type));
        CHECK(message.size() >= sizeof(T));
        T result;
        std::memcpy(&result, message.data(), sizeof(T));
        return result;
    }

    pid_t pid_ = -1;
    int socket_ = -1;
};

}  // namespace zenflow::test
