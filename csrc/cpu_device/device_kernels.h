// Passes over gradients and weights for a training device that is the CPU; each function is one pass over memory.
//
// The trainer loads this shared library with ctypes (lightning_zenflow/kernels/base.py). Functions do not fail, and are
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

// One step of the kernel in replay_adamw.h: `count` is that of applied steps, this one included, `factor` the clip coefficient
// over the loss scale. The [n] weights receive the masters, and may be the gradient. A call that finds `step` in `done` does
// nothing, and others write it there: the caller may repeat a call that it does not know to have returned.
void zenflow_adamw(float* master, float* exp_avg, float* exp_avg_sq, const void* gradient, void* weights, int64_t n,
                   const zenflow::Hyperparameters* hyperparameters, int64_t count, float factor, uint32_t dtype,
                   int64_t n_threads, int32_t* done, int32_t step);

}  // extern "C"
#pragma GCC visibility pop

namespace zenflow {

// The rows of a matrix from `begin` to `end`.
struct Rows {
    int64_t begin, end;
};

// `zenflow_route` of some rows, for one element type; compiled once per instruction set.
using RouteKernel = void (*)(const void* gradient, Rows rows, int64_t columns, float* squared_norms, void* slot);

// `instruction_set` must be available.
RouteKernel route_kernel(DataType dtype, InstructionSet instruction_set);

ZENFLOW_DECLARE_PER_ISA(RouteKernel select_route_kernel(DataType dtype))

}  // namespace zenflow
