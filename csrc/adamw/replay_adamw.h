// AdamW over several steps in one pass over memory.
//
// A window's gradients are applied in order, each with its own step's coefficients, while a tile of master weights and moments
// stays in the L1 cache: S steps move 24 + (S + 1) * sizeof(gradient) bytes per parameter instead of 28 S.
//
// Per element and step, each operation rounded once to float, in the order of DeepSpeed's CPU Adam:
//
//     g = float(gradient) * grad_scale
//     g = fma(w, weight_decay, g)                     Adam with decay only
//     m = fma(g, one_minus_beta1, m * beta1)
//     v = fma(g * g, one_minus_beta2, v * beta2)
//     u = m / fma(sqrt(v), inv_sqrt_bias_correction2, eps)
//     w = fma(w, -lr * weight_decay, w)               AdamW with decay only
//     w = fma(u, -lr / bias_correction1, w)
//
// and at the end, with the last step's coefficients and the same u,
//
//     published = fma(u, prediction_steps * -lr / bias_correction1, w)
//
// A *tentative* step may follow the others: it starts from the state that they leave, is published, and leaves that state as it
// is. One step and a tentative one move 30 bytes per parameter.
//
// Moments may be stored as bfloat16 (stochastic_rounding.h), or in 8 bits (moments_in_8_bits.h): they are rounded once a call.
// All steps but the first of a call, the tentative one included, start from what the one before computed, unrounded. One step and
// a tentative one move 22 bytes per parameter, or 18 in 8 bits.
//
// Results have the same bits for every instruction set and number of threads, and however elements and, with float moments, steps
// are divided among calls; moments in 8 bits only if calls begin at tiles. (NaN payloads may differ.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/cpu_features.h"
#include "common/protocol.h"

namespace zenflow {

// What weight decay acts on: nothing, the gradient (Adam), or the weight itself (AdamW).
enum class Decay { kNone, kGradient, kWeight };

// Coefficients of one step of one parameter group, in the kernel's precision.
struct StepCoefficients {
    float grad_scale;  // clip coefficient over loss scale
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float inv_sqrt_bias_correction2;  // 1 / sqrt(1 - beta2^count)
    float eps;
    float step_size;     // -lr / (1 - beta1^count)
    float decay_factor;  // kGradient: weight_decay; kWeight: -lr * weight_decay
    Decay decay;
};

// Coefficients of the `count`-th applied step (from 1), computed in double and rounded once. Pure.
StepCoefficients step_coefficients(const Hyperparameters& hyperparameters, int64_t count, float clip);

// Not owned: master weights and moments from some element on, with which a tile begins.
struct AnyState {
    float* master;
    void* exp_avg;  // of the type that the kernel was made for
    void* exp_avg_sq;
    MomentScales* scales = nullptr;  // of the tile that begins here and those behind it; for moments in 8 bits
};

// The same with the moments' type: float, BFloat16, or int8_t for moments in 8 bits.
template <typename Moment>
struct StateOf {
    float* master;
    Moment* exp_avg;
    std::conditional_t<std::is_same_v<Moment, int8_t>, uint8_t, Moment>* exp_avg_sq;
    MomentScales* scales = nullptr;

    // `n`: whole tiles, if there are scales.
    ZENFLOW_INLINE StateOf operator+(size_t n) const {
        return {master + n, exp_avg + n, exp_avg_sq + n, scales == nullptr ? nullptr : scales + n / kTileElements};
    }
    ZENFLOW_INLINE operator AnyState() const { return {master, exp_avg, exp_avg_sq, scales}; }
};
using AdamState = StateOf<float>;

// What the noise of stochastic rounding is a function of; without effect on float moments.
struct Noise {
    uint32_t seed = 0;             // noise_seed(last committed step of the window)
    uint32_t first_element = 0;    // index of the first element in the partition, modulo 2^32
    bool of_slow_exp_avg = false;  // whether bfloat16's exp_avg is rounded stochastically as well
};

// The steps to apply. Not owned: both arrays have an entry for each of the n_steps, and one for the tentative step if there is
// one.
struct WindowView {
    size_t n_steps;                // without the tentative step
    const void* const* gradients;  // gradients[s]: gradient of step s at the first element
    const StepCoefficients* coefficients;
    float prediction_steps;  // distance along the momentum at which weights are published; 0: exact
    bool has_tentative = false;
    Noise noise{};
};

// Applies a window to the first `n` elements of `state` and writes the new weights, predicted and rounded to nearest even, to
// `published`. Without any step it only publishes, exactly. All arrays are aligned to their element type and do not overlap, but
// gradients may coincide with each other and with `published`. Thread-safe for disjoint elements.
//
// The elements begin at `journal`'s position; a killed call can be repeated from its new position on (tile_journal.h).
using ReplayKernel = void (*)(const AnyState& state, size_t n, const WindowView& window, void* published, JournalEntry& journal);

// The kernel for these element types: `model` of gradients and published weights, not kInt8; `moments`, not kFloat16.
// `instruction_set` must be available.
ReplayKernel replay_kernel(DataType model, DataType moments, InstructionSet instruction_set);

ZENFLOW_DECLARE_PER_ISA(ReplayKernel select_replay_kernel(DataType model, DataType moments))

}  // namespace zenflow
