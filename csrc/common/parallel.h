// OpenMP's parallel region as a function.
#pragma once

#include <omp.h>

// libgomp is not instrumented, so ThreadSanitizer cannot see that the start and the end of a region synchronize with its caller.
// The region's own function is excluded because it reads the caller's variables before it can acquire.
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

// Calls body(thread, n_threads) once on each of OpenMP's threads, the caller being thread 0, and returns when all have returned.
// The caller's earlier writes happen before the calls, and the calls happen before its later reads. `body` must not throw.
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
