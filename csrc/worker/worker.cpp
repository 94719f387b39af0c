// The worker process: one per rank, started by the trainer with two inherited file descriptors. It executes update jobs and
// exits on request or when the trainer is gone. protocol.h holds the contract.
#include <fcntl.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstring>
#include <exception>
#include <iostream>
#include <string_view>
#include <vector>

#include "common/cpu_features.h"
#include "common/error.h"
#include "worker/arena.h"
#include "worker/bench.h"
#include "worker/block_replay.h"
#include "worker/channel.h"
#include "worker/cores.h"
#include "worker/inbox.h"
#include "worker/requests.h"
#include "worker/step_records.h"

namespace zenflow {
namespace {

constexpr std::string_view kUsage =
    "usage: zenflow-worker --arena-fd N --socket-fd N --cores 2,3,5 [--word-timeout-ms 600000]\n"
    "       zenflow-worker --bench --cores 2,3,5 [--elements N] [--repeats N] [--max-steps N]\n"
    "       zenflow-worker --version\n"
    "\n"
    "  --arena-fd          inherited memfd that holds the arena\n"
    "  --socket-fd         inherited end of a SOCK_SEQPACKET socket pair with the trainer\n"
    "  --cores             logical cores, one thread pinned to each\n"
    "  --word-timeout-ms   limit of the wait for a word of a step or a block, in milliseconds\n"
    "  --bench             measure the kernel: windows of 1, 2, 4, ... steps on one block\n";

struct Options {
    std::vector<int> cores;
    int64_t arena_fd = -1;
    int64_t socket_fd = -1;
    int64_t word_timeout_ms = 600000;
    BenchOptions bench;
};

// Parses pairs of an option and its value: those of the benchmark, or those of a worker.
Options parse_options(const std::vector<std::string_view>& arguments, size_t first, bool is_bench) {
    struct Number {
        std::string_view option;
        int64_t smallest;
        int64_t* value;
    };
    Options options;
    BenchOptions& bench = options.bench;
    const std::array<Number, 3> of_bench = {
        {{"--elements", 1, &bench.elements}, {"--repeats", 1, &bench.repeats}, {"--max-steps", 1, &bench.max_steps}}};
    const std::array<Number, 3> of_worker = {{{"--arena-fd", 0, &options.arena_fd},
                                              {"--socket-fd", 0, &options.socket_fd},
                                              {"--word-timeout-ms", 1, &options.word_timeout_ms}}};
    const std::array<Number, 3>& numbers = is_bench ? of_bench : of_worker;
    for (size_t i = first; i < arguments.size(); i += 2) {
        const std::string_view option = arguments[i];
        require(i + 1 < arguments.size(), option, ": its value is missing, or there is no such option");
        const std::string_view text = arguments[i + 1];
        if (option == "--cores") {
            options.cores = parse_cores(text);
            continue;
        }
        const auto number = std::find_if(numbers.begin(), numbers.end(), [&](const Number& n) { return n.option == option; });
        require(number != numbers.end(), option, ": there is no such option");
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number->value);
        require(error == std::errc() && end == text.data() + text.size() && *number->value >= number->smallest &&
                    *number->value <= INT32_MAX,
                option, " must be a number from ", number->smallest, " to ", INT32_MAX, ", got '", text, "'");
    }
    require(is_bench || options.arena_fd >= 0, "--arena-fd is missing");
    require(is_bench || options.socket_fd >= 0, "--socket-fd is missing");
    require(!options.cores.empty(), "--cores is missing");
    return options;
}

int64_t now_ns() {
    const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since_start).count();
}

// Executes a job whose steps are resolved, and acknowledges it. Returns false if the trainer is gone.
bool serve_job(const Inbox::Received& message, BlockReplay& replay, Channel& channel) {
    const UpdateJob& job = message.job;
    const int64_t start_ns = now_ns();
    Done done{static_cast<uint32_t>(MessageType::kDone), job.block, job.job_id, 0};
    if (replay.acknowledge(job)) return channel.send(done);
    replay.run(job, message.slots.data());
    done.busy_ns = now_ns() - start_ns;
    // The socket's lock makes all earlier writes happen before the trainer's receipt of Done.
    return channel.send(done);
}

// Carries out a Touch, and acknowledges it. Returns false if the trainer is gone.
bool serve_touch(const Inbox::Received& message, const Arena& arena, Channel& channel) {
    const int64_t start_ns = now_ns();
    const size_t size = message.bytes.size();
    require(size == sizeof(Touch), "touch: the message must have ", sizeof(Touch), " bytes, got ", size);
    Touch request;
    std::memcpy(&request, message.bytes.data(), sizeof(request));
    touch_rows(arena, request);
    return channel.send(
        Acknowledged{static_cast<uint32_t>(MessageType::kAcknowledged), 0, request.request_id, now_ns() - start_ns});
}

// Returns when the trainer requests an exit or is gone.
void serve(const Options& options, Channel& channel) {
    const Arena arena(static_cast<int>(options.arena_fd));
    const bool begins = arena.begun_job() == 0;  // the training
    pin_threads(options.cores, begins);
    const StepRecords records(arena);
    records.nothing_missing();  // an earlier worker may have been killed while it waited
    BlockReplay replay(arena, records);
    // Before the trainer, which waits for Ready, writes there. After a restart the memory is already allocated.
    if (begins) touch_states(arena);

    if (!channel.send(Ready{static_cast<uint32_t>(MessageType::kReady), static_cast<uint32_t>(options.cores.size()), kVersion}))
        return;
    Inbox inbox(arena, channel, records, replay, std::chrono::milliseconds(options.word_timeout_ms));
    while (const auto message = inbox.next()) {
        switch (static_cast<MessageType>(message->type)) {
            case MessageType::kJob:
                if (!serve_job(*message, replay, channel)) return;
                break;
            case MessageType::kExit:
                return;
            case MessageType::kTouch:
                if (!serve_touch(*message, arena, channel)) return;
                break;
            default:
                fail("message: type must be 1 (job), 2 (exit) or 7 (touch), got ", message->type);
        }
    }
}

int run(const Options& options) {
    // It needs the arena and its socket only.
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    for (const int64_t fd : {options.arena_fd, options.socket_fd}) fcntl(static_cast<int>(fd), F_SETFD, FD_CLOEXEC);
    // A terminal sends these to the whole process group; the trainer handles them, and the socket reports its death.
    std::signal(SIGINT, SIG_IGN);
    std::signal(SIGHUP, SIG_IGN);
    // A closed standard error must not end the process before the error message is sent.
    std::signal(SIGPIPE, SIG_IGN);
    Channel channel(static_cast<int>(options.socket_fd));
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
    if (arguments.empty() || (arguments.size() == 1 && arguments[0] == "--help")) {
        (arguments.empty() ? std::cerr : std::cout) << kUsage;
        return arguments.empty() ? 2 : 0;
    }
    try {
        if (arguments.size() == 1 && arguments[0] == "--version") {
            std::cout << "zenflow-worker protocol " << kVersion << ' ' << name(best_instruction_set()) << '\n';
            return 0;
        }
        const bool is_bench = arguments[0] == "--bench";
        const Options options = parse_options(arguments, is_bench ? 1 : 0, is_bench);
        if (!is_bench) return run(options);
        run_benchmark(options.cores, options.bench, std::cout);
        return 0;
    } catch (const std::exception& error) {
        std::cerr << "zenflow-worker: " << error.what() << '\n';
        return 1;
    }
}

}  // namespace
}  // namespace zenflow

int main(int argc, char** argv) { return zenflow::main({argv + 1, argv + argc}); }
