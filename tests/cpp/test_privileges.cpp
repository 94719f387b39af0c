#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "check.h"
#include "worker/privileges.h"

namespace zenflow {
namespace {

// Statuses of the child below.
enum Outcome { kRefused = 10, kNotSupported, kSocket, kSocketOfThread, kProgram };

bool socket_is_refused() { return socket(AF_INET, SOCK_STREAM, 0) < 0 && errno == EPERM; }

Outcome try_all() {
    give_up_privileges({});
    if (!refuse_network_and_programs()) return kNotSupported;
    if (!socket_is_refused()) return kSocket;
    bool refused = false;
    std::thread([&] { refused = socket_is_refused(); }).join();
    if (!refused) return kSocketOfThread;
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
