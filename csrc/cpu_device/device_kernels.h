// Passes over gradients and weights for a training device that is the CPU; each function is one pass over memory.
//
// The trainer loads this shared library with ctypes; lightning_zenflow/kernels/cpu.py mirrors the structures. Functions do not
// fail, and are thread-safe for disjoint outputs. Those that take `n_parts`, at least 1, work on parts with disjoint outputs, the
// last on the caller's thread and each other on one of its own: none outlives a call, which Python's exceptions do not interrupt.
//
// Matrices are row-major, [rows, columns], contiguous. `dtype` is a DataType of protocol.h. The order of summation does not
// depend on the instruction set, so results have the same bits on every CPU (sums over columns depend on how the caller divides
// rows). Pointers stay the caller's.
#pragma once

#include <cstdint>

#include "common/cpu_features.h"
#include "common/protocol.h"

#pragma GCC visibility push(default)
extern "C" {

struct zenflow_route_args {
    const void* gradient;  // [rows, columns]
    int64_t rows;
    int64_t columns;
    float* row_squared_norms;  // [rows]: overwritten
    float* col_squared_norms;  // [columns]: added to; or null
    void* slot;                // [rows, columns]: receives a copy; or null
    const int64_t* indices;    // [n_selected]: columns; null: the first n_selected
    int64_t n_selected;
    void* selected;  // [rows, n_selected]: receives gradient[:, indices]
    uint32_t dtype;  // of gradient, slot and selected
};

struct zenflow_route_part {
    const zenflow_route_args* runs;  // in order; they may add to the same column norms
    int64_t n_runs;
};

// Routes a gradient in one pass: squared norms, which are not finite where the gradient is not, a copy, and selected columns. The
// copy uses non-temporal stores; it happens before a later store of the calling thread.
void zenflow_route(const zenflow_route_part* parts, int64_t n_parts);

struct zenflow_factored_step_args {
    const float* row_squared_norms;  // [rows], of the step's gradient
    int64_t rows;
    const float* col_squared_norms;  // [columns]
    int64_t columns;
    float* row;  // [rows]: the second moment, updated; steps[1] counts what is in it
    float* col;  // [columns]
    float* steps;
    float* row_scale;  // [rows]: overwritten
    float* col_scale;  // [columns]: overwritten
    double beta2;
    double lr;
    float scale;  // factor on the gradient; NaN if it is not known
};

// One step of a factored second moment and the scales of its provisional update: `Kernels.factored_step_`.
// lightning_zenflow/kernels/factored.py has the equations. Sums and the power are computed in double. Returns whether the
// squared norms and the factor are finite; if not, only the scales are written.
bool zenflow_factored_step(const zenflow_factored_step_args* args);

struct zenflow_provisional_update_args {
    void* weights;         // [rows, columns]: updated
    const void* gradient;  // [rows, columns]
    int64_t rows;
    int64_t columns;
    const float* row_scale;  // [rows]
    const float* col_scale;  // [columns]
    const int32_t* noise;    // [noise_mask + 1], a power of two
    int64_t noise_mask;
    int64_t first;  // index of the first element in the noise
    float size;
    uint32_t dtype;  // of weights and gradient
};

// w <- w - (g * (row_scale[row] * size)) * col_scale[column], each operation rounded once to float, then rounded to the weights'
// type: bfloat16 stochastically, by the low 16 bits of noise[(first + i) & noise_mask] for element i; others to nearest even.
void zenflow_provisional_update(const zenflow_provisional_update_args* parts, int64_t n_parts);

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
void zenflow_adamw(const zenflow_adamw_args* parts, int64_t n_parts);

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

// The functions that are compiled once per instruction set, for one element type.
struct DeviceKernels {
    void (*route)(const zenflow_route_args& args);
    void (*provisional_update)(const zenflow_provisional_update_args& args);
    bool (*factored_step)(const zenflow_factored_step_args& args);
};

// `instruction_set` must be available.
DeviceKernels device_kernels(DataType dtype, InstructionSet instruction_set);

ZENFLOW_DECLARE_PER_ISA(DeviceKernels select_device_kernels(DataType dtype))

}  // namespace zenflow
