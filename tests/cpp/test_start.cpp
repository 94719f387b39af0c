// What the worker does at its start: it pins its threads and gives up privileges.
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "common/parallel.h"
#include "worker/cores.h"
#include "worker/privileges.h"

namespace zenflow {
namespace {

using test::error_of;

std::vector<int> own_cores() {
    cpu_set_t set;
    CHECK_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
    std::vector<int> cores;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core, &set)) cores.push_back(core);
    }
    return cores;
}

// Affinity belongs to a thread, so each test pins its own.
void in_a_thread(const std::function<void()>& action) {
    std::exception_ptr failure;
    std::thread thread([&] {
        try {
            action();
        } catch (...) {
            failure = std::current_exception();
        }
    });
    thread.join();
    if (failure) std::rethrow_exception(failure);
}

TEST(cores, parses_lists) {
    CHECK(parse_cores("2,3,5") == std::vector<int>({2, 3, 5}));
    CHECK(parse_cores("0") == std::vector<int>({0}));
    for (const char* text : {"", ",", "1,", ",1", "1,,2", "a", "1-3", "1 ,2", "-1", "99999", "1.5", "99999999999999999999"}) {
        CHECK_CONTAINS(error_of([text] { parse_cores(text); }), "'" + std::string(text) + "'");
    }
    CHECK_CONTAINS(error_of([] { parse_cores("1,2,1"); }), "must be distinct, got 1 twice");
}

// Of all cores, also where it has inherited a narrower mask.
TEST(cores, pins_one_thread_to_each) {
    in_a_thread([] {
        const std::vector<int> cores = own_cores();
        cpu_set_t first;
        CPU_ZERO(&first);
        CPU_SET(cores.front(), &first);
        CHECK_EQ(sched_setaffinity(0, sizeof(first), &first), 0);
        pin_threads(cores);
        std::vector<std::vector<int>> pinned(cores.size());
        run_in_parallel([&pinned](int thread, int) { pinned[static_cast<size_t>(thread)] = own_cores(); });
        for (size_t i = 0; i < cores.size(); ++i) CHECK(pinned[i] == std::vector<int>({cores[i]}));
        CHECK_CONTAINS(error_of([] { pin_threads({8000}); }), "--cores: cannot pin a thread to core 8000: Invalid argument");
    });
}

// Statuses of the child below.
enum Outcome { kRefused = 10, kNotSupported, kSocket, kSocketOfThread, kProgram, kX32Socket, kX32Program };

bool socket_is_refused() { return socket(AF_INET, SOCK_STREAM, 0) < 0 && errno == EPERM; }

#if defined(__x86_64__)
// By the numbers of x86-64's second table of system calls, x32, in which a socket has the same number and a program another one.
// Kernels without that table answer ENOSYS to what the filter lets through.
constexpr long kX32 = 0x40000000;

bool x32_socket_is_refused() { return syscall(kX32 | __NR_socket, AF_INET, SOCK_STREAM, 0) < 0 && errno == EPERM; }

bool x32_program_is_refused(long number) { return syscall(kX32 | number, nullptr, nullptr, nullptr) < 0 && errno == EPERM; }
#endif

Outcome try_all() {
    give_up_privileges({});
    if (!refuse_network_and_programs()) return kNotSupported;
    if (!socket_is_refused()) return kSocket;
    bool refused = false;
    std::thread([&] { refused = socket_is_refused(); }).join();
    if (!refused) return kSocketOfThread;
#if defined(__x86_64__)
    if (!x32_socket_is_refused()) return kX32Socket;
    // execve, execveat.
    if (!x32_program_is_refused(520) || !x32_program_is_refused(545)) return kX32Program;
#endif
    char name[] = "/bin/true";
    char* const arguments[] = {name, nullptr};
    execv(name, arguments);
    return errno == EPERM ? kRefused : kProgram;
}

TEST(privileges, no_socket_and_no_other_program) {
    const pid_t child = fork();
    if (child == 0) _exit(try_all());
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    // An emulator has no seccomp; that the worker is restricted on a real kernel is checked from outside.
    if (WEXITSTATUS(status) != kNotSupported) CHECK_EQ(WEXITSTATUS(status), static_cast<int>(kRefused));
}

}  // namespace
}  // namespace zenflow
