#include "worker/cores.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "common/error.h"
#include "common/parallel.h"

namespace zenflow {
namespace {

// The kernel rejects masks shorter than its own; a single cpu_set_t has 1024 cores.
constexpr int kMaxCores = 8192;

// Returns 0 or errno. The core need not be in the inherited mask, which is the trainer's own choice.
int pin_this_thread(int core) {
    std::array<cpu_set_t, kMaxCores / CPU_SETSIZE> set{};
    CPU_SET_S(core, sizeof(set), set.data());
    return sched_setaffinity(0, sizeof(set), set.data()) == 0 ? 0 : errno;
}

}  // namespace

std::vector<int> parse_cores(std::string_view text) {
    std::vector<int> cores;
    const char* position = text.data();
    const char* const end = text.data() + text.size();
    while (true) {
        int core = -1;
        const auto [next, error] = std::from_chars(position, end, core);
        require(error == std::errc() && core >= 0 && core < kMaxCores && (next == end || *next == ','),
                "--cores must be core numbers such as 2,3,5, got '", text, "'");
        require(std::find(cores.begin(), cores.end(), core) == cores.end(), "--cores must be distinct, got ", core, " twice in '",
                text, "'");
        cores.push_back(core);
        if (next == end) return cores;
        position = next + 1;
    }
}

void pin_threads(const std::vector<int>& cores, bool all) {
    const int n_threads = static_cast<int>(cores.size());
    omp_set_dynamic(0);
    omp_set_num_threads(n_threads);
    int n_started = 0;
    std::vector<int> errors(cores.size());
    run_in_parallel([&](int thread, int n_running) {
        const auto index = static_cast<size_t>(thread);
        if (thread == 0) n_started = n_running;
        errors[index] = pin_this_thread(cores[index]);
    });
    for (size_t i = 0; i < cores.size(); ++i) {
        // A training goes on when its host has taken cores away since its start.
        require(errors[i] == 0 || !all, "--cores: cannot pin a thread to core ", cores[i], ": ", std::strerror(errors[i]));
    }
    require(n_started == n_threads, "OpenMP must start ", n_threads, " threads, one for each of --cores, got ", n_started,
            ": remove OMP_THREAD_LIMIT from the environment, or raise it");
}

}  // namespace zenflow
