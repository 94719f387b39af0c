// What the training device does with a gradient, for a device that is the CPU: each function is one pass over memory.
//
// A shared library that the trainer loads; plain C functions, none of which starts threads, allocates or fails. Callers cut the
// work into rows and call from as many threads as they like: calls that write different elements may run at the same time.
//
// Matrices are row-major, [rows, columns], without gaps. Element types are numbered as in protocol.h. Sums are formed in an order
// that does not depend on the instruction set, so results have the same bits on every CPU (column sums depend on how the caller
// cuts the rows).
#pragma once

#include <cstdint>

#include "protocol.h"

#pragma GCC visibility push(default)
extern "C" {

// Takes a gradient in one pass. Sums of squares: `row_energy[rows]` is overwritten; `column_energy[columns]` is added to, or
// null; they are not finite where the gradient is not. A copy goes past the caches to `copy[rows, columns]`, if that is not null;
// it is visible to whoever sees a later store of the calling thread. selected[row * n_selected + i] = gradient[row * columns +
// indices[i]]; without indices the first `n_selected` columns are selected.
void zenflow_take(const void* gradient, uint32_t dtype, int64_t rows, int64_t columns, float* row_energy, float* column_energy,
                  void* copy, const int64_t* indices, int64_t n_selected, void* selected);

// One step of a factored second moment, and the factors of the update that belongs to it: `factored_step_` in
// lightning_zenflow/provisional.py, which says what the numbers mean; sums and the power are formed in double. `row[rows]`,
// `column[columns]` and `*steps` are updated, `of_rows[rows]` and `of_columns[columns]` overwritten. Returns whether the sums of
// squares are finite; if not, nothing but the factors is written.
bool zenflow_factored_step(const float* row_energy, int64_t rows, const float* column_energy, int64_t columns, float scale,
                           double beta2, double lr, float* row, float* column, float* steps, float* of_rows, float* of_columns);

// w <- w - (g * (of_rows[row] * size)) * of_columns[column], each operation rounded once to float, then rounded to the weights'
// type: bfloat16 stochastically, by the low 16 bits of noise[(first + i) & noise_mask] for the i-th element; others to nearest
// even. Weights and gradient have the same type.
void zenflow_stand_in(void* weights, const void* gradient, uint32_t dtype, int64_t rows, int64_t columns, const float* of_rows,
                      float size, const float* of_columns, const int32_t* noise, int64_t noise_mask, int64_t first);

// One step of the kernel in replay_adamw.h for `n` elements; `weights` receives the new master weights, rounded to nearest even;
// it may be `gradient`. `count` is the number of applied steps including this one, `factor` the clip coefficient over the loss
// scale.
void zenflow_adamw(float* master, float* exp_avg, float* exp_avg_sq, const void* gradient, void* weights, uint32_t dtype,
                   int64_t n, const zenflow::Hyperparameters* hyperparameters, int64_t count, float factor);

// selected[row * n_selected + i] = matrix[row * width + indices[i]]
void zenflow_gather_columns(const void* matrix, uint32_t dtype, int64_t rows, int64_t width, const int64_t* indices,
                            int64_t n_selected, void* selected);

// matrix[row * width + indices[i]] = selected[row * n_selected + i]; without indices all of the matrix is overwritten.
struct zenflow_column_write {
    void* matrix;
    int64_t rows;
    int64_t width;
    const int64_t* indices;
    int64_t n_selected;
    const void* selected;
};

// The inverse of `zenflow_gather_columns`, for matrices of one type.
void zenflow_scatter_columns(const zenflow_column_write* writes, int64_t n_writes, uint32_t dtype);

}  // extern "C"
#pragma GCC visibility pop
