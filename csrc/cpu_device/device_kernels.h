// Passes over gradients and weights for a training device that is the CPU; each function is one pass over memory.
//
// The trainer loads this shared library with ctypes; lightning_zenflow/kernels/cpu.py mirrors the structures. Functions do not
// fail, and are thread-safe for disjoint outputs. Those that take `n_threads`, at least 1, divide rows or elements among so many,
// of which the caller's is the last: none outlives a call, which Python's exceptions do not interrupt.
//
// Matrices are row-major, [rows, columns], contiguous. `dtype` is a DataType of protocol.h. The order of summation does not
// depend on the instruction set, so results have the same bits on every CPU (sums over columns depend on the number of threads).
// Pointers stay the caller's.
#pragma once

#include <cstdint>

#include "common/cpu_features.h"
#include "common/protocol.h"

#pragma GCC visibility push(default)
extern "C" {

struct zenflow_destination {
    int64_t first_row;  // of the gradient
    int64_t rows;
    void* slot;              // [rows, columns]: receives a copy; or null
    const int64_t* indices;  // [n_selected]: columns; null: the first n_selected
    int64_t n_selected;
    void* selected;  // [rows, n_selected]: receives the rows' entries in these columns
};

struct zenflow_route_args {
    const void* gradient;  // [rows, columns]
    int64_t rows;
    int64_t columns;
    float* row_squared_norms;                 // [rows]: overwritten
    float* col_squared_norms;                 // [n_threads, columns]: added to, by each thread for its rows; or null
    const zenflow_destination* destinations;  // which together have every row once
    int64_t n_destinations;
    uint32_t dtype;  // of gradient, slots and selected entries
};

// Routes a gradient in one pass: squared norms, which are not finite where the gradient is not, copies, and selected columns. The
// copies use non-temporal stores; they happen before a later store of the calling thread.
void zenflow_route(const zenflow_route_args* args, int64_t n_threads);

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

struct zenflow_adamw_args {
    float* master;  // [n], as the moments: updated
    float* exp_avg;
    float* exp_avg_sq;
    const void* gradient;  // [n]
    void* weights;         // [n]: receives master, rounded to nearest even; may be `gradient`
    int64_t n;
    const zenflow::Hyperparameters* hyperparameters;
    int64_t count;   // applied steps, including this one
    float factor;    // clip coefficient over loss scale
    uint32_t dtype;  // of gradient and weights
};

// One step of the kernel in replay_adamw.h.
void zenflow_adamw(const zenflow_adamw_args* args, int64_t n_threads);

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
    // Of rows within a destination; the last argument is the thread's sums over columns, or null.
    void (*route)(const zenflow_route_args& args, const zenflow_destination& destination, Rows rows, float* col_squared_norms);
    void (*provisional_update)(const zenflow_provisional_update_args& args, Rows rows);
};

// `instruction_set` must be available.
DeviceKernels device_kernels(DataType dtype, InstructionSet instruction_set);

ZENFLOW_DECLARE_PER_ISA(DeviceKernels select_device_kernels(DataType dtype))

}  // namespace zenflow
