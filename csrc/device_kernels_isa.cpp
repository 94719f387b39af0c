// See replay_adamw_kernel.cpp for how and why this file is compiled once per instruction set.
#include "device_kernels_isa.h"

#include "half.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace zenflow {
namespace ZENFLOW_KERNEL {
namespace {

// Sums run in this many lanes whatever the vector's width, over runs short enough for float.
constexpr int64_t kLanes = 16;
constexpr int64_t kRun = 512;

// Sum of squares of one run; column energies are added to if there are any.
template <bool kColumns, typename T>
ZENFLOW_INLINE double run_energy(const T* __restrict gradient, float* __restrict column_energy, int64_t n) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const float g = to_float(gradient[i + lane]);
            const float square = g * g;
            lanes[lane] += square;
            if constexpr (kColumns) column_energy[i + lane] += square;
        }
    }
    for (; i < n; ++i) {
        const float g = to_float(gradient[i]);
        const float square = g * g;
        lanes[i % kLanes] += square;
        if constexpr (kColumns) column_energy[i] += square;
    }
    double sum = 0.0;
    for (const float lane : lanes) sum += static_cast<double>(lane);
    return sum;
}

// Copies without reading the target into the caches first, which would take half as much bandwidth again, and without filling
// them with what the worker will read from memory anyway. `finish_streaming` comes before anybody is told about the copy.
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

ZENFLOW_INLINE void finish_streaming() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

template <typename T>
void take(const void* gradient, int64_t rows, int64_t columns, float* row_energy, float* column_energy, void* copy,
          const int64_t* indices, int64_t n_selected, void* selected) {
    for (int64_t row = 0; row < rows; ++row) {
        const T* const g = static_cast<const T*>(gradient) + row * columns;
        double of_row = 0.0;
        for (int64_t begin = 0; begin < columns; begin += kRun) {
            const int64_t n = columns - begin < kRun ? columns - begin : kRun;
            const T* const run = g + begin;
            of_row +=
                column_energy != nullptr ? run_energy<true>(run, column_energy + begin, n) : run_energy<false>(run, nullptr, n);
            if (copy != nullptr) stream(run, static_cast<T*>(copy) + row * columns + begin, static_cast<size_t>(n) * sizeof(T));
        }
        row_energy[row] = static_cast<float>(of_row);
        T* const target = static_cast<T*>(selected) + row * n_selected;
        if (indices == nullptr && n_selected > 0) __builtin_memcpy(target, g, static_cast<size_t>(n_selected) * sizeof(T));
        for (int64_t i = 0; indices != nullptr && i < n_selected; ++i) target[i] = g[indices[i]];
    }
    finish_streaming();
}

// Sum in an order that is the same for every width of vectors.
ZENFLOW_INLINE double sum(const float* values, int64_t n) {
    double lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<double>(values[i + lane]);
    }
    for (; i < n; ++i) lanes[i % kLanes] += static_cast<double>(values[i]);
    double total = 0.0;
    for (const double lane : lanes) total += lane;
    return total;
}

// Second moments below it belong to rows or columns without any gradient.
constexpr float kSmallest = 1e-30f;

// mean <- beta * mean + (1 - beta) * (energy * factor)
ZENFLOW_INLINE void add_to_mean(float* __restrict mean, const float* __restrict energy, float factor, double beta, int64_t n) {
    const auto of_mean = static_cast<float>(beta), of_energy = static_cast<float>(1.0 - beta);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) mean[i] = of_mean * mean[i] + of_energy * (energy[i] * factor);
}

// inverse <- 1 / sqrt(mean)
ZENFLOW_INLINE void inverse_roots(const float* __restrict mean, float* __restrict inverse, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) inverse[i] = 1.0f / __builtin_sqrtf(mean[i] > kSmallest ? mean[i] : kSmallest);
}

bool factored_step(const float* row_energy, int64_t rows, const float* column_energy, int64_t columns, float scale, double beta2,
                   double lr, float* row, float* column, float* steps, float* of_rows, float* of_columns) {
    // In float, as the moments are: squares overflow there that double still holds.
    const bool finite = __builtin_isfinite(static_cast<float>(sum(column_energy, columns)));
    if (finite) {
        const float squared = scale * scale;
        add_to_mean(row, row_energy, squared / static_cast<float>(columns), beta2, rows);
        add_to_mean(column, column_energy, squared / static_cast<float>(rows), beta2, columns);
        *steps += 1.0f;
    }
    const double n = *steps > 1.0f ? static_cast<double>(*steps) : 1.0;
    const auto bias_correction = static_cast<float>(1.0 - __builtin_pow(beta2, n));
    const auto mean = static_cast<float>(sum(column, columns) / static_cast<double>(columns));
    inverse_roots(column, of_columns, columns);
    inverse_roots(row, of_rows, rows);
    const float root = __builtin_sqrtf(mean * bias_correction), size = scale * static_cast<float>(lr);
#pragma omp simd
    for (int64_t i = 0; i < rows; ++i) of_rows[i] = of_rows[i] * root * size;
    return finite;
}

ZENFLOW_INLINE void store(BFloat16* target, float value, int32_t noise) {
    // Adding 16 random bits carries into the upper half with the probability that the lower half stands for.
    target->bits = static_cast<uint16_t>((float_bits(value) + static_cast<uint32_t>(noise)) >> 16);
}

ZENFLOW_INLINE void store(Float16* target, float value, int32_t) { *target = from_float<Float16>(value); }

ZENFLOW_INLINE void store(float* target, float value, int32_t) { *target = value; }

template <typename T>
void stand_in(void* weights, const void* gradient, int64_t rows, int64_t columns, const float* of_rows, float size,
              const float* of_columns, const int32_t* noise, int64_t noise_mask, int64_t first) {
    for (int64_t row = 0; row < rows; ++row) {
        T* const w = static_cast<T*>(weights) + row * columns;
        const T* const g = static_cast<const T*>(gradient) + row * columns;
        const float of_row = of_rows[row] * size;
        int64_t begin = 0;
        while (begin < columns) {
            // Up to where the noise starts again, so that it is read in a straight line.
            const int64_t offset = (first + row * columns + begin) & noise_mask;
            const int64_t rest = noise_mask + 1 - offset;
            const int64_t n = columns - begin < rest ? columns - begin : rest;
            T* const __restrict target = w + begin;
            const T* const __restrict source = g + begin;
            const float* const __restrict of_column = of_columns + begin;
            const int32_t* const __restrict bits = noise + offset;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                const float update = to_float(source[i]) * of_row * of_column[i];
                store(target + i, to_float(target[i]) - update, bits[i]);
            }
            begin += n;
        }
    }
}

}  // namespace

DeviceKernels select_device_kernels(DataType dtype) {
    switch (dtype) {
        case DataType::kBFloat16:
            return {take<BFloat16>, stand_in<BFloat16>, factored_step};
        case DataType::kFloat16:
            return {take<Float16>, stand_in<Float16>, factored_step};
        case DataType::kFloat32:
            break;
    }
    return {take<float>, stand_in<float>, factored_step};
}

}  // namespace ZENFLOW_KERNEL
}  // namespace zenflow
