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

// Sum of `value(i)` over i < n, in an order that is the same for every vector width.
template <typename Lane, typename Value>
ZENFLOW_INLINE double sum_of(int64_t n, const Value& value) {
    Lane lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += value(i + lane);
    }
    for (; i < n; ++i) lanes[i % kLanes] += value(i);
    double total = 0.0;
    for (const Lane lane : lanes) total += static_cast<double>(lane);
    return total;
}

// Squared norm of one run; column norms are added to if there are any.
template <bool kColumns, typename T>
ZENFLOW_INLINE double squared_norm(const T* __restrict gradient, float* __restrict col_squared_norms, int64_t n) {
    return sum_of<float>(n, [&](int64_t i) {
        const float g = to_float(gradient[i]);
        if constexpr (kColumns) col_squared_norms[i] += g * g;
        return g * g;
    });
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
void route(const zenflow_route_args& args) {
    const int64_t columns = args.columns, n_selected = args.n_selected;
    for (int64_t row = 0; row < args.rows; ++row) {
        const T* const gradient = static_cast<const T*>(args.gradient) + row * columns;
        double sum = 0.0;
        for (int64_t begin = 0; begin < columns; begin += kRun) {
            const int64_t n = columns - begin < kRun ? columns - begin : kRun;
            const T* const run = gradient + begin;
            float* const norms = args.col_squared_norms;
            sum += norms != nullptr ? squared_norm<true>(run, norms + begin, n) : squared_norm<false>(run, nullptr, n);
            if (args.slot != nullptr) {
                stream(run, static_cast<T*>(args.slot) + row * columns + begin, static_cast<size_t>(n) * sizeof(T));
            }
        }
        args.row_squared_norms[row] = static_cast<float>(sum);
        T* const selected = static_cast<T*>(args.selected) + row * n_selected;
        const int64_t* const indices = args.indices;
        if (indices == nullptr && n_selected > 0) {
            __builtin_memcpy(selected, gradient, static_cast<size_t>(n_selected) * sizeof(T));
        }
        for (int64_t i = 0; indices != nullptr && i < n_selected; ++i) selected[i] = gradient[indices[i]];
    }
#ifdef __SSE2__
    _mm_sfence();
#else
    // Before the word by which this thread, or one that waits for it, tells the worker that the gradients are there.
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

ZENFLOW_INLINE double sum(const float* values, int64_t n) {
    return sum_of<double>(n, [&](int64_t i) { return static_cast<double>(values[i]); });
}

// Second moments below it belong to rows or columns without gradient.
constexpr float kSmallest = 1e-30f;

// mean <- beta * mean + (1 - beta) * (squared_norms * factor)
ZENFLOW_INLINE void add_to_mean(float* __restrict mean, const float* __restrict squared_norms, float factor, double beta,
                                int64_t n) {
    const auto old_weight = static_cast<float>(beta), new_weight = static_cast<float>(1.0 - beta);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) mean[i] = old_weight * mean[i] + new_weight * (squared_norms[i] * factor);
}

// inverse <- 1 / sqrt(mean)
ZENFLOW_INLINE void inverse_roots(const float* __restrict mean, float* __restrict inverse, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) inverse[i] = 1.0f / __builtin_sqrtf(mean[i] > kSmallest ? mean[i] : kSmallest);
}

bool factored_step(const zenflow_factored_step_args& args) {
    const int64_t rows = args.rows, columns = args.columns;
    // In float, as the moments are: squares overflow there that double still holds.
    const bool finite = __builtin_isfinite(static_cast<float>(sum(args.col_squared_norms, columns)) * args.scale);
    if (finite) {
        const float squared = args.scale * args.scale;
        add_to_mean(args.row, args.row_squared_norms, squared / static_cast<float>(columns), args.beta2, rows);
        add_to_mean(args.col, args.col_squared_norms, squared / static_cast<float>(rows), args.beta2, columns);
        *args.steps += 1.0f;
    }
    const double n = *args.steps > 1.0f ? static_cast<double>(*args.steps) : 1.0;
    const auto bias_correction = static_cast<float>(1.0 - __builtin_pow(args.beta2, n));
    const auto mean = static_cast<float>(sum(args.col, columns) / static_cast<double>(columns));
    inverse_roots(args.col, args.col_scale, columns);
    inverse_roots(args.row, args.row_scale, rows);
    const float root = __builtin_sqrtf(mean * bias_correction), size = args.scale * static_cast<float>(args.lr);
    float* const row_scale = args.row_scale;
#pragma omp simd
    for (int64_t i = 0; i < rows; ++i) row_scale[i] = row_scale[i] * root * size;
    return finite;
}

ZENFLOW_INLINE void store(BFloat16* target, float value, int32_t noise) {
    // The carry from 16 random bits rounds up with a probability that equals the discarded fraction.
    target->bits = static_cast<uint16_t>((float_bits(value) + static_cast<uint32_t>(noise)) >> 16);
}

template <typename T>
ZENFLOW_INLINE void store(T* target, float value, int32_t) {
    *target = from_float<T>(value);
}

template <typename T>
void provisional_update(const zenflow_provisional_update_args& args) {
    const int64_t columns = args.columns;
    for (int64_t row = 0; row < args.rows; ++row) {
        T* const weights = static_cast<T*>(args.weights) + row * columns;
        const T* const gradients = static_cast<const T*>(args.gradient) + row * columns;
        const float row_scale = args.row_scale[row] * args.size;
        int64_t begin = 0;
        while (begin < columns) {
            // Up to the end of the noise, so that it is read contiguously.
            const int64_t offset = (args.first + row * columns + begin) & args.noise_mask;
            const int64_t rest = args.noise_mask + 1 - offset;
            const int64_t n = columns - begin < rest ? columns - begin : rest;
            T* const __restrict w = weights + begin;
            const T* const __restrict g = gradients + begin;
            const float* const __restrict col_scale = args.col_scale + begin;
            const int32_t* const __restrict noise = args.noise + offset;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                const float update = to_float(g[i]) * row_scale * col_scale[i];
                store(w + i, to_float(w[i]) - update, noise[i]);
            }
            begin += n;
        }
    }
}

}  // namespace

DeviceKernels select_device_kernels(DataType dtype) {
    return with_type(dtype, [](auto value) -> DeviceKernels {
        using T = decltype(value);
        return {route<T>, provisional_update<T>, factored_step};
    });
}

}  // namespace ZENFLOW_ISA
}  // namespace zenflow
