#include "adamw/replay_adamw.h"

#include <cmath>

namespace zenflow {

StepCoefficients step_coefficients(const Hyperparameters& h, int64_t count, float clip) {
    const auto rounded = [](double value) { return static_cast<float>(value); };
    const double bias_correction1 = 1.0 - std::pow(h.beta1, static_cast<double>(count));
    const double bias_correction2 = 1.0 - std::pow(h.beta2, static_cast<double>(count));
    const Decay decay = h.weight_decay == 0.0 ? Decay::kNone : h.decoupled != 0 ? Decay::kWeight : Decay::kGradient;
    const float decay_factor = rounded(decay == Decay::kWeight ? -h.lr * h.weight_decay : h.weight_decay);
    return {clip,
            rounded(h.beta1),
            rounded(1.0 - h.beta1),
            rounded(h.beta2),
            rounded(1.0 - h.beta2),
            rounded(1.0 / std::sqrt(bias_correction2)),
            rounded(h.eps),
            rounded(-h.lr / bias_correction1),
            decay_factor,
            decay};
}

ReplayKernel replay_kernel(DataType model, DataType moments, InstructionSet instruction_set) {
    return ZENFLOW_FUNCTION_FOR(instruction_set, select_replay_kernel)(model, moments);
}

}  // namespace zenflow
