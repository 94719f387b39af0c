// The kernel of replay_adamw.h. CMakeLists.txt compiles this file once per instruction set, with ZENFLOW_KERNEL naming the
// namespace that holds the result. Everything but `select_kernel` is local to the file and nothing of the standard library is
// called: the linker would keep one copy of a shared function, compiled for whichever instruction set came first.
#include "half.h"
#include "replay_adamw.h"

namespace zenflow {
namespace ZENFLOW_KERNEL {

ReplayKernel select_kernel(DataType gradient, DataType published);

namespace {

// Elements per tile: master and moments take 6 KB, which leaves a first-level cache of 32 KB room for the gradients on their way.
constexpr size_t kTile = 512;

// As many windows' steps are read in time by the hardware's own prefetching; with 8 and 16 asking for them takes a quarter off.
constexpr size_t kStreams = 4;

template <Decay kDecay, typename Gradient>
void apply_step(float* __restrict master, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                const Gradient* __restrict gradient, const StepCoefficients& coefficients, size_t n) {
    const StepCoefficients c = coefficients;
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
        float w = master[i];
        float g = to_float(gradient[i]) * c.grad_scale;
        if constexpr (kDecay == Decay::kGradient) g = __builtin_fmaf(w, c.decay_factor, g);
        const float m = __builtin_fmaf(g, c.one_minus_beta1, exp_avg[i] * c.beta1);
        const float v = __builtin_fmaf(g * g, c.one_minus_beta2, exp_avg_sq[i] * c.beta2);
        const float u = m / __builtin_fmaf(__builtin_sqrtf(v), c.inv_sqrt_bias_correction2, c.eps);
        if constexpr (kDecay == Decay::kWeight) w = __builtin_fmaf(w, c.decay_factor, w);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        master[i] = __builtin_fmaf(u, c.step_size, w);
    }
}

template <typename Gradient>
void apply_step(float* master, float* exp_avg, float* exp_avg_sq, const Gradient* gradient, const StepCoefficients& coefficients,
                size_t n) {
    switch (coefficients.decay) {
        case Decay::kNone:
            return apply_step<Decay::kNone>(master, exp_avg, exp_avg_sq, gradient, coefficients, n);
        case Decay::kGradient:
            return apply_step<Decay::kGradient>(master, exp_avg, exp_avg_sq, gradient, coefficients, n);
        case Decay::kWeight:
            return apply_step<Decay::kWeight>(master, exp_avg, exp_avg_sq, gradient, coefficients, n);
    }
}

template <typename Gradient>
void add_scaled(float* __restrict sum, const Gradient* __restrict gradient, float scale, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) sum[i] = __builtin_fmaf(to_float(gradient[i]), scale, sum[i]);
}

template <typename Published>
void publish(const float* __restrict master, Published* __restrict published, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) published[i] = from_float<Published>(master[i]);
}

template <typename Published>
void publish_ahead(const float* __restrict master, const float* __restrict exp_avg, const float* __restrict exp_avg_sq,
                   const StepCoefficients& coefficients, float look_ahead, Published* __restrict published, size_t n) {
    const StepCoefficients c = coefficients;
    const float distance = look_ahead * c.step_size;
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
        const float u = exp_avg[i] / __builtin_fmaf(__builtin_sqrtf(exp_avg_sq[i]), c.inv_sqrt_bias_correction2, c.eps);
        published[i] = from_float<Published>(__builtin_fmaf(u, distance, master[i]));
    }
}

// Asks for the next tile's gradients. Reading beyond the array's end is harmless here: a prefetch never faults.
template <typename Gradient>
void prefetch(const Gradient* gradient) {
    const char* const begin = reinterpret_cast<const char*>(gradient);
    for (size_t byte = 0; byte < kTile * sizeof(Gradient); byte += 64) __builtin_prefetch(begin + byte);
}

template <typename Gradient, typename Published>
void replay(float* master, float* exp_avg, float* exp_avg_sq, const WindowView& window, size_t n, void* published) {
    const size_t n_steps = window.n_steps;
    const StepCoefficients* const coefficients = window.coefficients;
    const bool accumulates = window.rule == Rule::kAccumulate;
    for (size_t begin = 0; begin < n; begin += kTile) {
        const size_t size = n - begin < kTile ? n - begin : kTile;
        float* const w = master + begin;
        float* const m = exp_avg + begin;
        float* const v = exp_avg_sq + begin;
        float sum[kTile];
        if (accumulates) __builtin_memset(sum, 0, sizeof(sum));
        for (size_t s = 0; s < n_steps; ++s) {
            const Gradient* const g = static_cast<const Gradient*>(window.gradients[s]) + begin;
            if (n_steps > kStreams) prefetch(g + kTile);
            if (accumulates) {
                add_scaled(sum, g, coefficients[s].grad_scale, size);
            } else {
                apply_step(w, m, v, g, coefficients[s], size);
            }
        }
        if (accumulates && n_steps > 0) apply_step(w, m, v, sum, coefficients[n_steps], size);
        Published* const target = static_cast<Published*>(published) + begin;
        if (n_steps > 0 && window.look_ahead != 0.0f) {
            publish_ahead(w, m, v, coefficients[accumulates ? n_steps : n_steps - 1], window.look_ahead, target, size);
        } else {
            publish(w, target, size);
        }
    }
}

template <typename Gradient>
ReplayKernel select_published(DataType published) {
    switch (published) {
        case DataType::kBFloat16:
            return replay<Gradient, BFloat16>;
        case DataType::kFloat16:
            return replay<Gradient, Float16>;
        case DataType::kFloat32:
            break;
    }
    return replay<Gradient, float>;
}

}  // namespace

ReplayKernel select_kernel(DataType gradient, DataType published) {
    switch (gradient) {
        case DataType::kBFloat16:
            return select_published<BFloat16>(published);
        case DataType::kFloat16:
            return select_published<Float16>(published);
        case DataType::kFloat32:
            break;
    }
    return select_published<float>(published);
}

}  // namespace ZENFLOW_KERNEL
}  // namespace zenflow
