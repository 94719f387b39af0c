// Passes over gradients and weights for a training device that is the CPU; each function is one pass over memory.
//
// The trainer loads this shared library with ctypes (lightning_zenflow/kernels/cpu.py). Functions do not fail, and are
// thread-safe for disjoint outputs. Those that take `n_threads`, at least 1, divide rows or elements among so many, of which the
// caller's is the last: none outlives a call, which Python's exceptions do not interrupt.
//
// Matrices are row-major, [rows, columns], contiguous. `dtype` is a DataType of protocol.h. The order of summation does not
// depend on the instruction set, so results have the same bits on every CPU, with any number of threads. Pointers stay the
// caller's.
#pragma once

#include <cstdint>

#include "common/cpu_features.h"
#include "common/protocol.h"

#pragma GCC visibility push(default)
extern "C" {

// Squared norms of the rows, [rows], which are not finite where the gradient is not, and a copy in the slot, if that is not null.
// The copy uses non-temporal stores; it happens before a later store of the calling thread.
void zenflow_route(const void* gradient, int64_t rows, int64_t columns, float* squared_norms, void* slot, uint32_t dtype,
                   int64_t n_threads);

struct zenflow_provisional_update_args {
    void* weights;         // [rows, columns]: updated
    const void* gradient;  // [rows, columns]
    int64_t rows;
    int64_t columns;
    const float* row_scale;  // [rows]
    const float* col_scale;  // [columns]
    const int32_t* noise;    // [noise_mask + 1], a power of two
    int64_t noise_mask;
    float size;
    uint32_t dtype;  // of weights and gradient
};

// w <- w - (g * (row_scale[row] * size)) * col_scale[column], each operation rounded once to float, then rounded to the weights'
// type: bfloat16 stochastically, by the low 16 bits of noise[i & noise_mask] for element i; others to nearest even.
void zenflow_provisional_update(const zenflow_provisional_update_args* args, int64_t n_threads);

// One step of the kernel in replay_adamw.h: `count` is that of applied steps, this one included, `factor` the clip coefficient
// over the loss scale. The [n] weights receive the masters, and may be the gradient.
void zenflow_adamw(float* master, float* exp_avg, float* exp_avg_sq, const void* gradient, void* weights, int64_t n,
                   const zenflow::Hyperparameters* hyperparameters, int64_t count, float factor, uint32_t dtype,
                   int64_t n_threads);

struct zenflow_columns {
    void* matrix;  // [rows, width]
    int64_t rows;
    int64_t width;
    const int64_t* indices;  // [n_selected]; null: all columns
    int64_t n_selected;
    const void* selected;  // [rows, n_selected]
};

// matrix[:, indices] <- selected, for each of `n` matrices of one type.
void zenflow_scatter_columns(const zenflow_columns* columns, int64_t n, uint32_t dtype);

}  // extern "C"
#pragma GCC visibility pop

namespace zenflow {

// The rows of a matrix from `begin` to `end`.
struct Rows {
    int64_t begin, end;
};

// The functions that are compiled once per instruction set, for one element type.
struct DeviceKernels {
    void (*route)(const void* gradient, Rows rows, int64_t columns, float* squared_norms, void* slot);
    void (*provisional_update)(const zenflow_provisional_update_args& args, Rows rows);
};

// `instruction_set` must be available.
DeviceKernels device_kernels(DataType dtype, InstructionSet instruction_set);

ZENFLOW_DECLARE_PER_ISA(DeviceKernels select_device_kernels(DataType dtype))

}  // namespace zenflow
