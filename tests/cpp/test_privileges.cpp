#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "check.h"
#include "worker/privileges.h"

namespace zenflow {
namespace {

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
