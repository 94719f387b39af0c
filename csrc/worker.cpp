// The worker process: one per rank, started by the trainer with two inherited file descriptors. It replays AdamW on the blocks
// that the trainer names and leaves when it is told to or when the trainer is gone. protocol.h holds the contract.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstring>
#include <exception>
#include <iostream>
#include <string_view>
#include <vector>

#include "arena.h"
#include "bench.h"
#include "block_replay.h"
#include "channel.h"
#include "clock.h"
#include "cores.h"
#include "error.h"
#include "layout.h"
#include "replay_adamw.h"
#include "step_records.h"

namespace zenflow {
namespace {

constexpr std::string_view kUsage =
    "usage: zenflow-worker --arena-fd N --socket-fd N --cores 2,3,5 [--word-timeout-ms 600000]\n"
    "       zenflow-worker --bench --cores 2,3,5 [--elements N] [--repeats N] [--max-steps N]\n"
    "       zenflow-worker --layout | --version\n"
    "\n"
    "The first is started by lightning_zenflow, not by hand.\n"
    "\n"
    "  --arena-fd          inherited memfd that holds the arena\n"
    "  --socket-fd         inherited end of a SOCK_SEQPACKET socket pair, the other end being the trainer's\n"
    "  --cores             logical cores, one thread pinned to each\n"
    "  --word-timeout-ms   longest wait for a step's clip coefficient, in milliseconds\n"
    "  --bench             measure the kernel: windows of 1, 2, 4, ... steps on a block of that many elements\n"
    "  --layout            print sizes and offsets of the shared structures\n"
    "  --version           print the protocol's version and the kernel's instruction set\n";

struct Options {
    int arena_fd = -1;
    int socket_fd = -1;
    std::vector<int> cores;
    std::chrono::milliseconds word_timeout{600000};
};

int64_t parse_number(std::string_view option, std::string_view text, int64_t smallest) {
    int64_t value = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < smallest || value > INT32_MAX) {
        fail(option, ": '", text, "' is no number from ", smallest, " to ", INT32_MAX);
    }
    return value;
}

Options parse_options(const std::vector<std::string_view>& arguments) {
    Options options;
    for (size_t i = 0; i < arguments.size(); i += 2) {
        const std::string_view option = arguments[i];
        if (i + 1 == arguments.size()) fail(option, ": its value is missing, or there is no such option");
        const std::string_view value = arguments[i + 1];
        if (option == "--arena-fd") {
            options.arena_fd = static_cast<int>(parse_number(option, value, 0));
        } else if (option == "--socket-fd") {
            options.socket_fd = static_cast<int>(parse_number(option, value, 0));
        } else if (option == "--cores") {
            options.cores = parse_cores(value);
        } else if (option == "--word-timeout-ms") {
            options.word_timeout = std::chrono::milliseconds(parse_number(option, value, 1));
        } else {
            fail(option, ": there is no such option");
        }
    }
    if (options.arena_fd < 0) fail("--arena-fd is missing");
    if (options.socket_fd < 0) fail("--socket-fd is missing");
    if (options.cores.empty()) fail("--cores is missing");
    return options;
}

BenchOptions parse_bench_options(const std::vector<std::string_view>& arguments) {
    BenchOptions options;
    for (size_t i = 1; i < arguments.size(); i += 2) {
        const std::string_view option = arguments[i];
        if (i + 1 == arguments.size()) fail(option, ": its value is missing, or there is no such option");
        const std::string_view value = arguments[i + 1];
        if (option == "--cores") {
            options.cores = parse_cores(value);
        } else if (option == "--elements") {
            options.elements = parse_number(option, value, 1);
        } else if (option == "--repeats") {
            options.repeats = parse_number(option, value, 1);
        } else if (option == "--max-steps") {
            options.max_steps = parse_number(option, value, 1);
        } else {
            fail(option, ": there is no such option");
        }
    }
    if (options.cores.empty()) fail("--cores is missing");
    return options;
}

// A Round message, checked for its length only.
struct ReceivedRound {
    Round round;
    const uint32_t* pages;  // round.n_steps of them, inside the message

    explicit ReceivedRound(const Channel::Message& message) {
        if (message.size < sizeof(Round))
            fail("round: the message has ", message.size, " bytes, at least ", sizeof(Round), " are needed");
        std::memcpy(&round, message.data, sizeof(Round));
        const uint64_t expected = sizeof(Round) + uint64_t{round.n_steps} * sizeof(uint32_t);
        if (message.size != expected) {
            fail("round: the message has ", message.size, " bytes, but n_steps = ", round.n_steps, " needs ", expected);
        }
        pages = reinterpret_cast<const uint32_t*>(message.data + sizeof(Round));
    }
};

// Returns false if the trainer is gone.
bool serve_round(const ReceivedRound& received, const StepRecords& records, BlockReplay& replay, Channel& channel) {
    const auto [round, pages] = received;
    const int64_t received_ns = now_ns();
    replay.check(round, pages);
    records.check(round.first_step, round.n_steps);
    if (replay.is_complete(round)) {
        return channel.send(
            Done{static_cast<uint32_t>(MessageType::kDone), round.block, round.round_id, received_ns, 0, 0, 0, 0});
    }
    if (round.n_steps > 0) {
        const int64_t last_step = round.first_step + round.n_steps - 1;
        const auto trainer_gone = [&channel] { return channel.trainer_gone(); };
        const bool resolved = round.early != 0 ? records.resolve_early(last_step, round.block, trainer_gone)
                                               : records.resolve(last_step, trainer_gone);
        if (!resolved) return false;
    }
    const int64_t arrived_ns = now_ns();
    const std::vector<ThreadSpan>& spans = replay.run(round, pages);
    const int64_t finished_ns = now_ns();
    const size_t n_spans = std::min(spans.size(), kMaxThreadSpans);
    // Sending and receiving take the socket's lock, so whoever has read Done sees everything written before it.
    return channel.send(Done{static_cast<uint32_t>(MessageType::kDone), round.block, round.round_id, received_ns,
                             arrived_ns - received_ns, finished_ns - arrived_ns, static_cast<uint32_t>(n_spans), 0},
                        spans.data(), n_spans);
}

// Returns when the trainer asks for it or is gone.
void serve(const Options& options, Channel& channel) {
    const Arena arena(options.arena_fd);
    pin_threads(options.cores);
    const StepRecords records(arena, options.word_timeout);
    BlockReplay replay(arena, records);
    // Before the trainer, which waits for Ready, writes there. A worker that comes later finds the memory in its place.
    if (arena.begun_round() == 0) replay.touch_states();

    if (!channel.send(Ready{static_cast<uint32_t>(MessageType::kReady), static_cast<uint32_t>(options.cores.size()), kVersion}))
        return;
    while (const auto message = channel.receive()) {
        switch (static_cast<MessageType>(message->type)) {
            case MessageType::kRound:
                if (!serve_round(ReceivedRound(*message), records, replay, channel)) return;
                break;
            case MessageType::kExit:
                return;
            default:
                fail("message: type is ", message->type, ", allowed are ", static_cast<uint32_t>(MessageType::kRound),
                     " (round) and ", static_cast<uint32_t>(MessageType::kExit), " (exit)");
        }
    }
}

int run(const Options& options) {
    // A terminal sends these to the whole process group; the trainer decides what they mean, and its death is seen on the socket.
    std::signal(SIGINT, SIG_IGN);
    std::signal(SIGHUP, SIG_IGN);
    // A trainer that no longer reads our standard error must not end us before the error reaches the socket.
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
    if (arguments.size() == 1 && arguments[0] == "--layout") {
        print_layout(std::cout);
        return 0;
    }
    if (arguments.size() == 1 && arguments[0] == "--version") {
        std::cout << "zenflow-worker protocol " << kVersion << ' ' << name(best_instruction_set()) << '\n';
        return 0;
    }
    if (arguments.empty() || (arguments.size() == 1 && arguments[0] == "--help")) {
        (arguments.empty() ? std::cerr : std::cout) << kUsage;
        return arguments.empty() ? 2 : 0;
    }
    try {
        if (arguments[0] == "--bench") {
            run_benchmark(parse_bench_options(arguments), std::cout);
            return 0;
        }
        return run(parse_options(arguments));
    } catch (const std::exception& error) {
        std::cerr << "zenflow-worker: " << error.what() << '\n';
        return 1;
    }
}

}  // namespace
}  // namespace zenflow

int main(int argc, char** argv) { return zenflow::main({argv + 1, argv + argc}); }
