#include "worker/cores.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <ostream>

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
                "cores must be numbers such as 2,3,5, got '", text, "'");
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
        require(errors[i] == 0 || !all, "cannot pin a thread to core ", cores[i], ": ", std::strerror(errors[i]));
    }
    require(n_started == n_threads, "OpenMP must start ", n_threads, " threads, one for each core, got ", n_started,
            ": remove OMP_THREAD_LIMIT from the environment, or raise it");
}

void run_triad(const std::vector<int>& cores, std::ostream& output) {
    constexpr size_t kElements = 1 << 24;
    pin_threads(cores, true);
    // Not initialized here: the threads touch the pages of their own parts first.
    const std::unique_ptr<float[]> a(new float[kElements]), b(new float[kElements]);
    const auto in_parts = [&](const auto& work) {
        const double begin_s = omp_get_wtime();
        run_in_parallel([&](int thread, int n_threads) {
            const auto i = static_cast<size_t>(thread), n = static_cast<size_t>(n_threads);
            const size_t first = kElements * i / n;
            work(a.get() + first, b.get() + first, kElements * (i + 1) / n - first);
        });
        return omp_get_wtime() - begin_s;
    };
    in_parts([](float* a, float* b, size_t n) { std::fill_n(a, n, 1.0f), std::fill_n(b, n, 1.0f); });
    for (int repeat = 0; repeat < 3; ++repeat) {
        const double seconds = in_parts([](float* __restrict a, const float* __restrict b, size_t n) {
            for (size_t i = 0; i < n; ++i) a[i] += 1e-9f * b[i];
        });
        output << 3e-9 * sizeof(float) * kElements / seconds << '\n';
    }
}

}  // namespace zenflow
