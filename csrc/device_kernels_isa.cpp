// See replay_adamw_kernel.cpp for how and why this file is compiled once per instruction set.
#include "device_kernels_isa.h"

#include "half.h"

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

template <typename T>
void statistics(const void* gradient, int64_t rows, int64_t columns, float* row_energy, float* column_energy) {
    const T* const g = static_cast<const T*>(gradient);
    for (int64_t row = 0; row < rows; ++row) {
        double of_row = 0.0;
        for (int64_t begin = 0; begin < columns; begin += kRun) {
            const int64_t n = columns - begin < kRun ? columns - begin : kRun;
            const T* const run = g + row * columns + begin;
            of_row +=
                column_energy != nullptr ? run_energy<true>(run, column_energy + begin, n) : run_energy<false>(run, nullptr, n);
        }
        row_energy[row] = static_cast<float>(of_row);
    }
}

ZENFLOW_INLINE void store(BFloat16* target, float value, int32_t noise) {
    // Adding 16 random bits carries into the upper half with the probability that the lower half stands for.
    target->bits = static_cast<uint16_t>((float_bits(value) + static_cast<uint32_t>(noise)) >> 16);
}

ZENFLOW_INLINE void store(Float16* target, float value, int32_t) { *target = from_float<Float16>(value); }

ZENFLOW_INLINE void store(float* target, float value, int32_t) { *target = value; }

template <typename T>
void stand_in(void* weights, const void* gradient, int64_t rows, int64_t columns, const float* of_rows, const float* of_columns,
              const int32_t* noise, int64_t noise_mask, int64_t first) {
    for (int64_t row = 0; row < rows; ++row) {
        T* const w = static_cast<T*>(weights) + row * columns;
        const T* const g = static_cast<const T*>(gradient) + row * columns;
        const float of_row = of_rows[row];
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
            return {statistics<BFloat16>, stand_in<BFloat16>};
        case DataType::kFloat16:
            return {statistics<Float16>, stand_in<Float16>};
        case DataType::kFloat32:
            break;
    }
    return {statistics<float>, stand_in<float>};
}

}  // namespace ZENFLOW_KERNEL
}  // namespace zenflow
