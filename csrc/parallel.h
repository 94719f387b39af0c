// OpenMP's parallel region as a function.
#pragma once

#include <omp.h>

// libgomp is not instrumented: ThreadSanitizer does not see that a region begins after what its caller did before and ends before
// what the caller does next. The region's own function is left out because it reads the caller's variables before it can say so.
#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#define ZENFLOW_TSAN_ACQUIRE(address) __tsan_acquire(address)
#define ZENFLOW_TSAN_RELEASE(address) __tsan_release(address)
#define ZENFLOW_NO_TSAN __attribute__((no_sanitize_thread))
#else
#define ZENFLOW_TSAN_ACQUIRE(address) static_cast<void>(address)
#define ZENFLOW_TSAN_RELEASE(address) static_cast<void>(address)
#define ZENFLOW_NO_TSAN
#endif

namespace zenflow {

// How many threads the next parallel region of the caller has.
inline int n_parallel_threads() { return omp_get_max_threads(); }

// Calls body(thread, n_threads) once on each of OpenMP's threads, the caller being thread 0, and returns when all are through.
// What the caller did before happens before the calls, and they happen before what it does next. `body` must not throw.
template <typename Body>
ZENFLOW_NO_TSAN void run_in_parallel(const Body& body) {
    char order = 0;
    char* const address = &order;
    ZENFLOW_TSAN_RELEASE(address);
#pragma omp parallel default(none) shared(body) firstprivate(address)
    {
        ZENFLOW_TSAN_ACQUIRE(address);
        body(omp_get_thread_num(), omp_get_num_threads());
        ZENFLOW_TSAN_RELEASE(address);
    }
    ZENFLOW_TSAN_ACQUIRE(address);
}

}  // namespace zenflow
