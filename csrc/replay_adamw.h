// AdamW over several steps in one pass over memory.
//
// A window's gradients are applied in order, each with its own step's coefficients, while a tile of master weights and moments
// stays in the first-level cache: S steps move 24 + S * sizeof(gradient) + sizeof(published) bytes a parameter instead of 28 S.
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
//     published = fma(u, look_ahead * -lr / bias_correction1, w)
//
// The result has the same bits on every instruction set, for every number of threads, and however elements and steps are cut into
// calls. (Of a NaN only that it is one is promised.)
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol.h"

namespace zenflow {

// What weight decay acts on: nothing, the gradient (Adam), or the weight itself (AdamW).
enum class Decay { kNone, kGradient, kWeight };

// What one step of one parameter group multiplies with, in the kernel's precision.
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

// A window's gradients and what to do with them.
struct WindowView {
    Rule rule;
    size_t n_steps;
    const void* const* gradients;  // gradients[s] points at the first element's gradient of step s
    // kReplay: n_steps of them. kAccumulate: n_steps of which only `grad_scale` counts, then those of the one update.
    const StepCoefficients* coefficients;
    float look_ahead;  // in steps; 0 publishes the exact weights
};

// Applies a window to `n` elements, which begin at `slot`'s position, and writes the new weights, moved on by the look-ahead and
// rounded to nearest even, to `published`; n_steps = 0 only publishes, exactly. All arrays are aligned to their element type and
// do not overlap, but gradients may coincide with each other and with `published`, if their types are the same. Thread-safe for
// disjoint elements.
//
// A call that is killed can be made again for the elements from the slot's position on (tile_journal.h). Without a slot (null), a
// call that is killed leaves elements that nobody can make whole.
using ReplayKernel = void (*)(float* master, float* exp_avg, float* exp_avg_sq, const WindowView& window, size_t n,
                              void* published, JournalSlot* slot);

// What a kernel is compiled for, the best last. kBaseline is what every CPU of the architecture has.
enum class InstructionSet { kBaseline, kAvx2, kAvx512 };
constexpr InstructionSet kInstructionSets[] = {InstructionSet::kBaseline, InstructionSet::kAvx2, InstructionSet::kAvx512};

// "avx512" and the like, for messages.
const char* name(InstructionSet instruction_set);

// Whether this executable holds a kernel for it and this CPU and its operating system can run that.
bool available(InstructionSet instruction_set);

// The best available one.
InstructionSet best_instruction_set();

// The kernel for one pair of element types; `instruction_set` must be available.
ReplayKernel replay_kernel(DataType gradient, DataType published, InstructionSet instruction_set);

}  // namespace zenflow
