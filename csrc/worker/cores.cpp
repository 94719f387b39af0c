#include "worker/cores.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string>

#include "common/error.h"
#include "common/parallel.h"

namespace zenflow {
namespace {

// The kernel rejects masks shorter than its own; a single cpu_set_t has 1024 cores.
constexpr int kMaxCores = 8192;

class CoreSet {
  public:
    void add(int core) { CPU_SET_S(core, sizeof(sets_), sets_.data()); }
    bool contains(int core) const { return CPU_ISSET_S(core, sizeof(sets_), sets_.data()); }
    bool apply_to_this_thread() const { return sched_setaffinity(0, sizeof(sets_), sets_.data()) == 0; }
    bool read_from_this_thread() { return sched_getaffinity(0, sizeof(sets_), sets_.data()) == 0; }

    // As "0-3,8".
    std::string text() const {
        std::string result;
        for (int first = 0; first < kMaxCores; ++first) {
            if (!contains(first)) continue;
            int last = first;
            while (last + 1 < kMaxCores && contains(last + 1)) ++last;
            if (!result.empty()) result += ',';
            result += std::to_string(first);
            if (last > first) result += '-' + std::to_string(last);
            first = last;
        }
        return result;
    }

  private:
    std::array<cpu_set_t, kMaxCores / CPU_SETSIZE> sets_{};
};

// The cores that the kernel grants this process. The inherited mask may be narrower, because the trainer restricts itself to its
// own cores; so all cores are requested and the result is read back.
CoreSet usable_cores() {
    CoreSet everything;
    for (int core = 0; core < kMaxCores; ++core) everything.add(core);
    CoreSet usable;
    if (!everything.apply_to_this_thread() || !usable.read_from_this_thread()) {
        fail("--cores: cannot determine the usable cores: ", std::strerror(errno));
    }
    return usable;
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

void pin_threads(const std::vector<int>& cores) {
    const CoreSet usable = usable_cores();
    for (const int core : cores) {
        require(usable.contains(core), "--cores must be among this process's usable cores ", usable.text(), ", got ", core);
    }
    const int n_threads = static_cast<int>(cores.size());
    omp_set_dynamic(0);
    omp_set_num_threads(n_threads);
    int n_started = 0;
    std::vector<int> errors(cores.size());
    run_in_parallel([&](int thread, int n_running) {
        const auto index = static_cast<size_t>(thread);
        if (thread == 0) n_started = n_running;
        CoreSet own;
        own.add(cores[index]);
        errors[index] = own.apply_to_this_thread() ? 0 : errno;
    });
    for (size_t i = 0; i < cores.size(); ++i) {
        require(errors[i] == 0, "--cores: cannot pin a thread to core ", cores[i], ": ", std::strerror(errors[i]));
    }
    require(n_started == n_threads, "OpenMP must start ", n_threads, " threads, one for each of --cores, got ", n_started,
            ": remove OMP_THREAD_LIMIT from the environment, or raise it");
}

}  // namespace zenflow
