// The kernel of replay_adamw.h. CMakeLists.txt compiles this file once per instruction set, with ZENFLOW_KERNEL naming the
// namespace that holds the result. Everything but `select_kernel` is local to the file and nothing of the standard library is
// called: the linker would keep one copy of a shared function, compiled for whichever instruction set came first.
#include "half.h"
#include "replay_adamw.h"
#include "tile_journal.h"

namespace zenflow {
namespace ZENFLOW_KERNEL {

ReplayKernel select_kernel(DataType gradient, DataType published);

namespace {

// So small that a CPU that works out of order begins the next tile while it still copies and publishes this one: with 512
// elements the journal costs half as much again for four steps, with 128 a few percent.
constexpr size_t kTile = kTileElements;

// How far ahead gradients are asked for, in elements.
constexpr size_t kAhead = 512;

// So many steps' gradients are read in time by the hardware's own prefetching, and asking for them as well costs up to a third;
// with 16 steps it takes two fifths off.
constexpr size_t kStreams = 8;

// Master weights and moments of a tile.
struct TileState {
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
};

// What becomes of an update's weights: those of a window's last go to the model too, as they are or moved on. Published at once,
// they cost no second root and quotient.
enum class Publish { kNothing, kExact, kAhead };

// Where the model's weights go, and how many steps ahead.
template <typename Published>
struct Target {
    Published* published;
    float look_ahead;
};

// `from` and `to` are the same or do not overlap.
template <Decay kDecay, Publish kPublish, typename Gradient, typename Published>
void apply_step(const TileState& from, const TileState& to, const Gradient* gradient, const StepCoefficients& coefficients,
                const Target<Published>& target, size_t n) {
    const StepCoefficients c = coefficients;
    const float *const w_from = from.master, *const m_from = from.exp_avg, *const v_from = from.exp_avg_sq;
    float *const w_to = to.master, *const m_to = to.exp_avg, *const v_to = to.exp_avg_sq;
    Published* const published = target.published;
    const float distance = target.look_ahead * c.step_size;
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
        float w = w_from[i];
        float g = to_float(gradient[i]) * c.grad_scale;
        if constexpr (kDecay == Decay::kGradient) g = __builtin_fmaf(w, c.decay_factor, g);
        const float m = __builtin_fmaf(g, c.one_minus_beta1, m_from[i] * c.beta1);
        const float v = __builtin_fmaf(g * g, c.one_minus_beta2, v_from[i] * c.beta2);
        const float u = m / __builtin_fmaf(__builtin_sqrtf(v), c.inv_sqrt_bias_correction2, c.eps);
        if constexpr (kDecay == Decay::kWeight) w = __builtin_fmaf(w, c.decay_factor, w);
        m_to[i] = m;
        v_to[i] = v;
        w = __builtin_fmaf(u, c.step_size, w);
        w_to[i] = w;
        if constexpr (kPublish == Publish::kExact) published[i] = from_float<Published>(w);
        if constexpr (kPublish == Publish::kAhead) published[i] = from_float<Published>(__builtin_fmaf(u, distance, w));
    }
}

template <Publish kPublish, typename Gradient, typename Published>
void apply_step(const TileState& from, const TileState& to, const Gradient* gradient, const StepCoefficients& coefficients,
                const Target<Published>& target, size_t n) {
    switch (coefficients.decay) {
        case Decay::kNone:
            return apply_step<Decay::kNone, kPublish>(from, to, gradient, coefficients, target, n);
        case Decay::kGradient:
            return apply_step<Decay::kGradient, kPublish>(from, to, gradient, coefficients, target, n);
        case Decay::kWeight:
            return apply_step<Decay::kWeight, kPublish>(from, to, gradient, coefficients, target, n);
    }
}

// `last`: whether it is the window's last update.
template <typename Gradient, typename Published>
void apply_step(const TileState& from, const TileState& to, const Gradient* gradient, const StepCoefficients& coefficients,
                const Target<Published>& target, bool last, size_t n) {
    if (!last) return apply_step<Publish::kNothing>(from, to, gradient, coefficients, target, n);
    if (target.look_ahead == 0.0f) return apply_step<Publish::kExact>(from, to, gradient, coefficients, target, n);
    apply_step<Publish::kAhead>(from, to, gradient, coefficients, target, n);
}

void copy(const TileState& from, const TileState& to, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
        to.master[i] = from.master[i];
        to.exp_avg[i] = from.exp_avg[i];
        to.exp_avg_sq[i] = from.exp_avg_sq[i];
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

// Asks for the gradients of a tile further on. Reading beyond the array's end is harmless here: a prefetch never faults.
template <typename Gradient>
void prefetch(const Gradient* gradient) {
    const char* const begin = reinterpret_cast<const char*>(gradient);
    for (size_t byte = 0; byte < kTile * sizeof(Gradient); byte += 64) __builtin_prefetch(begin + byte);
}

// One tile; the order of its updates and marks is that of tile_journal.h. `apply(u, from, to)` does the update with number u.
template <typename Apply>
void update_tile(const TileState& tile, size_t n_updates, size_t size, JournalSlot* slot, const Apply& apply) {
    if (n_updates == 0) return;
    const size_t last = n_updates - 1;
    if (slot == nullptr) {
        for (size_t u = 0; u <= last; ++u) apply(u, tile, tile);
        return;
    }
    const TileState saved{slot->saved, slot->saved + kTile, slot->saved + 2 * kTile};
    if (!is_saved(*slot)) {
        if (last == 0) copy(tile, saved, size);
        for (size_t u = 0; u < last; ++u) apply(u, u == 0 ? tile : saved, saved);
        mark_saved(*slot);
    }
    apply(last, saved, tile);
}

template <typename Gradient, typename Published>
void replay(float* master, float* exp_avg, float* exp_avg_sq, const WindowView& window, size_t n, void* published,
            JournalSlot* slot) {
    const size_t n_steps = window.n_steps;
    const StepCoefficients* const coefficients = window.coefficients;
    for (size_t begin = 0; begin < n; begin += kTile) {
        const size_t size = n - begin < kTile ? n - begin : kTile;
        const TileState tile{master + begin, exp_avg + begin, exp_avg_sq + begin};
        const Target<Published> target{static_cast<Published*>(published) + begin, window.look_ahead};
        const auto gradient = [&](size_t step) {
            const Gradient* const g = static_cast<const Gradient*>(window.gradients[step]) + begin;
            if (n_steps > kStreams) prefetch(g + kAhead);
            return g;
        };
        if (window.rule == Rule::kAccumulate) {
            float sum[kTile];
            __builtin_memset(sum, 0, sizeof(sum));
            for (size_t s = 0; s < n_steps; ++s) add_scaled(sum, gradient(s), coefficients[s].grad_scale, size);
            update_tile(tile, n_steps > 0 ? 1 : 0, size, slot, [&](size_t, const TileState& from, const TileState& to) {
                apply_step(from, to, static_cast<const float*>(sum), coefficients[n_steps], target, true, size);
            });
        } else {
            update_tile(tile, n_steps, size, slot, [&](size_t u, const TileState& from, const TileState& to) {
                apply_step(from, to, gradient(u), coefficients[u], target, u == n_steps - 1, size);
            });
        }
        if (n_steps == 0) publish(tile.master, target.published, size);
        if (slot != nullptr) mark_done(*slot, size);
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
