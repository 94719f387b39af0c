// The trainer's side: an arena that test_cpp.py has made, a file in the folder that ZENFLOW_ARENAS names; and the worker
// executable, started as the trainer starts it.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "common/protocol.h"
#include "worker/arena.h"
#include "worker/step_records.h"

namespace zenflow::test {

// A memfd with the file's content.
inline int make_file(const std::string& name) {
    std::ifstream file(std::string(std::getenv("ZENFLOW_ARENAS")) + '/' + name, std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(file), {}};
    const int fd = memfd_create("zenflow-test-arena", MFD_CLOEXEC);
    CHECK_EQ(write(fd, content.data(), content.size()), static_cast<ssize_t>(content.size()));
    return fd;
}

// Owns the memory, and maps it as the worker does.
class TrainerArena : public Arena {
  public:
    explicit TrainerArena(const std::string& name) : TrainerArena(make_file(name)) {}
    ~TrainerArena() { close(fd_); }

    int fd() const { return fd_; }
    std::byte* memory() const { return at<std::byte>(0); }
    std::string image() const { return {reinterpret_cast<const char*>(memory()), header().total_bytes}; }

    // As the device does, the sequence number last, with release semantics. The second is a block's word.
    void write_word(int64_t step, float clip) { write_to(step_record(step).word, step, clip); }
    void write_block_word(uint32_t block, int64_t step, float clip) {
        write_to(const_cast<StepWord&>(block_word(block)), step, clip);
    }

  private:
    explicit TrainerArena(int fd) : Arena(fd), fd_(fd) {}

    static void write_to(StepWord& word, int64_t step, float clip) {
        word.clip = clip;
        word.check = check_of(clip, step);
        __atomic_store_n(&word.sequence, step, __ATOMIC_RELEASE);
    }

    const int fd_;
};

// The first usable logical core, as an argument of --cores.
inline std::string first_core() {
    cpu_set_t set;
    CHECK_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
    int core = 0;
    while (!CPU_ISSET(core, &set)) ++core;
    return std::to_string(core);
}

// Owns the process, which it kills on destruction, and the trainer's end of the socket.
class WorkerProcess {
  public:
    // Nothing receives its output: tests read errors from the messages.
    explicit WorkerProcess(const TrainerArena& arena) {
        int ends[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
        socket_ = ends[0];
        const timeval limit{kReceiveTimeoutS, 0};
        CHECK_EQ(setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
        std::string arguments[] = {ZENFLOW_WORKER, std::to_string(arena.fd()), std::to_string(ends[1]), first_core(), "600000"};
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
        close(socket_);
        if (pid_ > 0) {
            kill(pid_, SIGKILL);
            waitpid(pid_, nullptr, 0);
        }
    }
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;

    void submit(const UpdateJob& job, const std::vector<uint32_t>& slots) {
        std::string message(reinterpret_cast<const char*>(&job), sizeof(job));
        message.append(reinterpret_cast<const char*>(slots.data()), slots.size() * sizeof(uint32_t));
        CHECK_EQ(::send(socket_, message.data(), message.size(), MSG_NOSIGNAL), static_cast<ssize_t>(message.size()));
    }
    void signal(int number) { CHECK_EQ(kill(pid_, number), 0); }
    pid_t pid() const { return pid_; }

    // Bytes of messages that have not been received yet.
    size_t bytes_waiting() const {
        int bytes = 0;
        CHECK_EQ(ioctl(socket_, FIONREAD, &bytes), 0);
        return static_cast<size_t>(bytes);
    }

    // Wait for the next message, which must be of this type. The text of an Error message becomes the failure's.
    Ready receive_ready() { return receive<Ready>(MessageType::kReady); }
    Done receive_done() { return receive<Done>(MessageType::kDone); }

    // Waits for the exit and returns its status, or minus the number of the signal that killed the process.
    int wait() {
        int status = 0;
        CHECK(waitpid(std::exchange(pid_, -1), &status, 0) > 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }

  private:
    static constexpr int kReceiveTimeoutS = 120;  // of any message; builds with sanitizers are slow

    template <typename T>
    T receive(MessageType type) {
        std::string message(kMaxMessageBytes, '\0');
        const ssize_t size = recv(socket_, message.data(), message.size(), 0);
        if (size <= 0) throw CheckFailed("the worker sent nothing, or ended");
        message.resize(static_cast<size_t>(size));
        uint32_t actual = 0;
        std::memcpy(&actual, message.data(), sizeof(actual));
        if (actual != static_cast<uint32_t>(type))
            throw CheckFailed("the worker failed: " + message.substr(sizeof(MessageHeader)));
        CHECK_EQ(message.size(), sizeof(T));
        T result;
        std::memcpy(&result, message.data(), sizeof(T));
        return result;
    }

    pid_t pid_ = -1;
    int socket_ = -1;
};

}  // namespace zenflow::test
