// The worker process: one per rank, started by the trainer with two inherited file descriptors. It executes update jobs and
// exits on request or when the trainer is gone. protocol.h holds the contract.
#include <fcntl.h>
#include <omp.h>
#include <sys/prctl.h>

#include <charconv>
#include <chrono>
#include <csignal>
#include <exception>
#include <iostream>
#include <string_view>
#include <vector>

#include "common/cpu_features.h"
#include "common/error.h"
#include "worker/arena.h"
#include "worker/block_replay.h"
#include "worker/channel.h"
#include "worker/cores.h"
#include "worker/inbox.h"
#include "worker/step_records.h"

namespace zenflow {
namespace {

constexpr std::string_view kUsage =
    "usage: zenflow-worker ARENA_FD SOCKET_FD CORES WORD_TIMEOUT_MS     as the trainer starts it\n"
    "       zenflow-worker --bench CORES                                memory bandwidth in GB/s\n"
    "       zenflow-worker --version\n"
    "CORES: such as 2,3,5; one thread is pinned to each\n";

struct Options {
    int arena_fd;
    int socket_fd;
    std::vector<int> cores;
    int word_timeout_ms;  // limit of the wait for a word of a step or a block
};

int parse_number(std::string_view text) {
    int number = -1;
    std::from_chars(text.data(), text.data() + text.size(), number);
    require(number >= 0, "expected a number, got '", text, "'; see --help");
    return number;
}

// Carries out a message and answers it. Returns false if it asks for the exit, or the trainer is gone.
bool carry_out(const Inbox::Received& message, const Arena& arena, BlockReplay& replay, Channel& channel) {
    const double start_s = omp_get_wtime();
    const auto busy_ns = [start_s] { return static_cast<int64_t>(1e9 * (omp_get_wtime() - start_s)); };
    if (message.type == MessageType::kExit) return false;
    if (message.type == MessageType::kTouch) {
        arena.touch(message.touch);
        return channel.send(
            Acknowledged{static_cast<uint32_t>(MessageType::kAcknowledged), 0, message.touch.request_id, busy_ns()});
    }
    Done done{static_cast<uint32_t>(MessageType::kDone), message.job.block, message.job.job_id, 0};
    if (replay.run(message.job, message.slots.data())) done.busy_ns = busy_ns();
    // The socket's lock makes all earlier writes happen before the trainer's receipt of Done.
    return channel.send(done);
}

// Returns when the trainer requests an exit or is gone.
void serve(const Options& options, Channel& channel) {
    const Arena arena(options.arena_fd);
    const bool begins = arena.live().begun_job == 0;  // the training
    pin_threads(options.cores, begins);
    const StepRecords records(arena);
    records.nothing_missing();  // an earlier worker may have been killed while it waited
    BlockReplay replay(arena, records);
    // Before the trainer, which waits for Ready, writes there. After a restart the memory is already allocated.
    if (begins) arena.touch_states();

    if (!channel.send(Ready{static_cast<uint32_t>(MessageType::kReady), static_cast<uint32_t>(options.cores.size()), kVersion}))
        return;
    Inbox inbox(arena, channel, records, replay, std::chrono::milliseconds(options.word_timeout_ms));
    while (const auto message = inbox.next()) {
        if (!carry_out(*message, arena, replay, channel)) return;
    }
}

int run(const Options& options) {
    // It needs the arena and its socket only.
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    for (const int fd : {options.arena_fd, options.socket_fd}) fcntl(fd, F_SETFD, FD_CLOEXEC);
    // A terminal sends these to the whole process group; the trainer handles them, and the socket reports its death.
    std::signal(SIGINT, SIG_IGN);
    std::signal(SIGHUP, SIG_IGN);
    // A closed standard error must not end the process before the error message is sent.
    std::signal(SIGPIPE, SIG_IGN);
    Channel channel(options.socket_fd);
    try {
        serve(options, channel);
        return 0;
    } catch (const std::exception& error) {
        std::cerr << "zenflow-worker: " << error.what() << '\n';
        channel.send_error(error.what());
        return 1;
    }
}

int main(const std::vector<std::string_view>& arguments) {
    const std::string_view first = arguments.empty() ? "--help" : arguments[0];
    try {
        if (first == "--help") {
            std::cout << kUsage;
        } else if (first == "--version") {
            std::cout << "zenflow-worker protocol " << kVersion << ' ' << name(best_instruction_set()) << '\n';
        } else if (first == "--bench") {
            run_triad(parse_cores(arguments.back()), std::cout);
        } else {
            require(arguments.size() == 4, "expected four arguments; see --help");
            return run({parse_number(first), parse_number(arguments[1]), parse_cores(arguments[2]), parse_number(arguments[3])});
        }
        return 0;
    } catch (const std::exception& error) {
        std::cerr << "zenflow-worker: " << error.what() << '\n';
        return 1;
    }
}

}  // namespace
}  // namespace zenflow

int main(int argc, char** argv) { return zenflow::main({argv + 1, argv + argc}); }
