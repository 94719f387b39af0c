// The cores of the worker: lists of them, and pinned threads.
#include <sched.h>

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "common/parallel.h"
#include "worker/cores.h"

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

}  // namespace
}  // namespace zenflow
