#include "worker/privileges.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

namespace zenflow {
namespace {

#if defined(__x86_64__)
constexpr unsigned kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr unsigned kArchitecture = AUDIT_ARCH_AARCH64;
#else
constexpr unsigned kArchitecture = 0;
#endif

constexpr unsigned kRefuse = SECCOMP_RET_ERRNO | EPERM;
// Set in the numbers of x86-64's second table of system calls, x32; other architectures have no numbers as high.
constexpr unsigned kX32 = 0x40000000;
// The same on all architectures; headers before Linux 5.1 do not have it. It opens sockets, too.
constexpr unsigned kIoUringSetup = 425;

}  // namespace

void give_up_privileges(std::initializer_list<int> descriptors) {
    // Refused only by kernels before 3.5, where the process is no worse off than without.
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    for (const int fd : descriptors) fcntl(fd, F_SETFD, FD_CLOEXEC);
}

bool refuse_network_and_programs() {
#ifdef SECCOMP_FILTER_FLAG_SPEC_ALLOW
    if (kArchitecture == 0) return false;
    // The jumps count instructions from the next one.
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kArchitecture, 0, 6),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, kX32, 4, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_socket, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kIoUringSetup, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_execve, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_execveat, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, kRefuse),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    sock_fprog program{static_cast<unsigned short>(sizeof(filter) / sizeof(filter[0])), filter};
    // Without the flag, kernels before 5.16 switch off the CPU's speculation past stores for this process, which slows the
    // kernels.
    return syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program) == 0;
#else
    return false;
#endif
}

}  // namespace zenflow
