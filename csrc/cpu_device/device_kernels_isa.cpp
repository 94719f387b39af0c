// The passes of device_kernels.h, compiled once per instruction set (cpu_features.h).
#include "common/half.h"
#include "cpu_device/device_kernels.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace zenflow {
namespace ZENFLOW_ISA {
namespace {

// Sums use this many lanes for every vector width, over runs short enough for float.
constexpr int64_t kLanes = 16;
constexpr int64_t kRun = 512;

// Squared norm of one run, in an order that is the same for every vector width.
template <typename T>
ZENFLOW_INLINE double squared_norm(const T* __restrict gradient, int64_t n) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    const auto squared = [gradient](int64_t i) { return to_float(gradient[i]) * to_float(gradient[i]); };
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += squared(i + lane);
    }
    for (; i < n; ++i) lanes[i % kLanes] += squared(i);
    double total = 0.0;
    for (const float lane : lanes) total += static_cast<double>(lane);
    return total;
}

// Copies with non-temporal stores: reading the target into the caches first would take half as much bandwidth again, and the
// worker reads the copy from memory anyway. A fence behind it makes the copy visible before any later store.
ZENFLOW_INLINE void stream(const void* source, void* target, size_t bytes) {
    const char* from = static_cast<const char*>(source);
    char* to = static_cast<char*>(target);
#ifdef __SSE2__
    const size_t head = (16 - reinterpret_cast<uintptr_t>(to) % 16) % 16;
    if (bytes >= head + 16) {
        __builtin_memcpy(to, from, head);
        from += head, to += head, bytes -= head;
        for (; bytes >= 16; from += 16, to += 16, bytes -= 16) {
            _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        }
    }
#endif
    __builtin_memcpy(to, from, bytes);
}

template <typename T>
void route(const void* gradient, Rows rows, int64_t columns, float* squared_norms, void* slot) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        double sum = 0.0;
        for (int64_t begin = 0; begin < columns; begin += kRun) {
            const int64_t n = columns - begin < kRun ? columns - begin : kRun, first = row * columns + begin;
            const T* const run = static_cast<const T*>(gradient) + first;
            sum += squared_norm(run, n);
            if (slot != nullptr) stream(run, static_cast<T*>(slot) + first, static_cast<size_t>(n) * sizeof(T));
        }
        squared_norms[row] = static_cast<float>(sum);
    }
#ifdef __SSE2__
    _mm_sfence();
#else
    // Before the word by which this thread, or one that waits for it, tells the worker that the gradients are there.
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

}  // namespace

RouteKernel select_route_kernel(DataType dtype) {
    return with_type(dtype, [](auto value) -> RouteKernel { return route<decltype(value)>; });
}

}  // namespace ZENFLOW_ISA
}  // namespace zenflow
