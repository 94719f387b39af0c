#include "cores.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string>

#include "error.h"
#include "parallel.h"

namespace zenflow {
namespace {

// The kernel refuses masks shorter than its own; a plain cpu_set_t ends at 1024 cores.
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

// The cores this process may use at all. The mask it inherited may be narrower, because the trainer keeps to its own cores, so
// the question to the kernel is which of all cores it grants.
CoreSet usable_cores() {
    CoreSet everything;
    for (int core = 0; core < kMaxCores; ++core) everything.add(core);
    CoreSet usable;
    if (!everything.apply_to_this_thread() || !usable.read_from_this_thread()) {
        fail("--cores: cannot find out which cores may be used: ", std::strerror(errno));
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
        if (error != std::errc() || core < 0 || core >= kMaxCores || (next != end && *next != ',')) {
            fail("--cores: '", text, "' is no list of core numbers such as 2,3,5");
        }
        if (std::find(cores.begin(), cores.end(), core) != cores.end()) {
            fail("--cores: core ", core, " is listed twice in '", text, "'");
        }
        cores.push_back(core);
        if (next == end) return cores;
        position = next + 1;
    }
}

void pin_threads(const std::vector<int>& cores) {
    const CoreSet usable = usable_cores();
    for (const int core : cores) {
        if (!usable.contains(core)) fail("--cores: core ", core, " cannot be used by this process, allowed are ", usable.text());
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
        if (errors[i] != 0) fail("--cores: cannot pin a thread to core ", cores[i], ": ", std::strerror(errors[i]));
    }
    if (n_started != n_threads) {
        fail("OpenMP started ", n_started, " threads for the ", n_threads,
             " cores of --cores: remove OMP_THREAD_LIMIT from the environment, or raise it");
    }
}

}  // namespace zenflow
