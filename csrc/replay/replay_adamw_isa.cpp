// The kernel of replay_adamw.h, compiled once per instruction set (cpu_features.h).
#include <type_traits>

#include "common/half.h"
#include "replay/replay_adamw.h"
#include "replay/stochastic_rounding.h"
#include "replay/tile_journal.h"

namespace zenflow {
namespace ZENFLOW_ISA {

ReplayKernel select_replay_kernel(DataType gradient, DataType published, DataType moments);

namespace {

// Small enough for an out-of-order CPU to start the next tile while it copies and publishes this one: with 512 elements the
// journal adds half to the time of four steps, with 128 a few percent.
constexpr size_t kTile = kTileElements;

// In elements.
constexpr size_t kPrefetchDistance = 512;

// Up to this many gradient streams the hardware prefetcher suffices and software prefetching costs up to a third; with 16 it
// saves two fifths.
constexpr size_t kStreams = 8;

// Of an update's weights. The last update of a window publishes in the same pass, which saves a second square root and division.
enum class Publish { kNothing, kExact, kPredicted };

// One step on one tile.
template <typename Gradient, typename Published>
struct Update {
    const Gradient* gradient;
    const StepCoefficients* coefficients;
    Published* published;
    float prediction_steps;
    size_t n;
    Noise noise;
};

ZENFLOW_INLINE void store(float* exp_avg, float* exp_avg_sq, float m, float v, uint32_t, uint32_t) {
    *exp_avg = m;
    *exp_avg_sq = v;
}

ZENFLOW_INLINE void store(BFloat16* exp_avg, BFloat16* exp_avg_sq, float m, float v, uint32_t seed, uint32_t element) {
    *exp_avg = from_float<BFloat16>(m);
    *exp_avg_sq = round_stochastically(v, noise_of(seed, element));
}

// `from` and `to` are the same or do not overlap. A tentative step does not write to `to`.
template <Decay kDecay, bool kTentative, Publish kPublish, typename From, typename To, typename Gradient, typename Published>
void apply_step(const StateOf<From>& from, const StateOf<To>& to, const Update<Gradient, Published>& update) {
    const StepCoefficients c = *update.coefficients;
    const float* const w_from = from.master;
    const From *const m_from = from.exp_avg, *const v_from = from.exp_avg_sq;
    float* const w_to = to.master;
    To *const m_to = to.exp_avg, *const v_to = to.exp_avg_sq;
    const Noise noise = update.noise;
    const Gradient* const gradient = update.gradient;
    Published* const published = update.published;
    const float distance = update.prediction_steps * c.step_size;
    const size_t n = update.n;
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
        float w = w_from[i];
        float g = to_float(gradient[i]) * c.grad_scale;
        if constexpr (kDecay == Decay::kGradient) g = __builtin_fmaf(w, c.decay_factor, g);
        const float m = __builtin_fmaf(g, c.one_minus_beta1, to_float(m_from[i]) * c.beta1);
        const float v = __builtin_fmaf(g * g, c.one_minus_beta2, to_float(v_from[i]) * c.beta2);
        const float u = m / __builtin_fmaf(__builtin_sqrtf(v), c.inv_sqrt_bias_correction2, c.eps);
        if constexpr (kDecay == Decay::kWeight) w = __builtin_fmaf(w, c.decay_factor, w);
        w = __builtin_fmaf(u, c.step_size, w);
        if constexpr (!kTentative) {
            w_to[i] = w;
            store(m_to + i, v_to + i, m, v, noise.seed, noise.first_element + static_cast<uint32_t>(i));
        }
        if constexpr (kPublish == Publish::kExact) published[i] = from_float<Published>(w);
        if constexpr (kPublish == Publish::kPredicted) published[i] = from_float<Published>(__builtin_fmaf(u, distance, w));
    }
}

template <bool kTentative, Publish kPublish, typename From, typename To, typename Gradient, typename Published>
void apply_step(const StateOf<From>& from, const StateOf<To>& to, const Update<Gradient, Published>& update) {
    switch (update.coefficients->decay) {
        case Decay::kNone:
            return apply_step<Decay::kNone, kTentative, kPublish>(from, to, update);
        case Decay::kGradient:
            return apply_step<Decay::kGradient, kTentative, kPublish>(from, to, update);
        case Decay::kWeight:
            return apply_step<Decay::kWeight, kTentative, kPublish>(from, to, update);
    }
}

template <typename Moment>
void copy(const StateOf<Moment>& from, const AdamState& to, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
        to.master[i] = from.master[i];
        to.exp_avg[i] = to_float(from.exp_avg[i]);
        to.exp_avg_sq[i] = to_float(from.exp_avg_sq[i]);
    }
}

template <typename Published>
void publish(const float* __restrict master, Published* __restrict published, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) published[i] = from_float<Published>(master[i]);
}

// Of a tile's gradients. Reading beyond the end of the array is harmless: a prefetch never faults.
template <typename Gradient>
void prefetch(const Gradient* gradient) {
    const char* const begin = reinterpret_cast<const char*>(gradient);
    for (size_t byte = 0; byte < kTile * sizeof(Gradient); byte += 64) __builtin_prefetch(begin + byte);
}

// Calls `apply(step, from, to)` for each step on a tile, in the order that tile_journal.h prescribes. n_steps >= 1. Float moments
// need no journal.
template <typename Moment, typename Apply>
void update_tile(const StateOf<Moment>& tile, size_t n_steps, size_t size, JournalEntry* journal, const Apply& apply) {
    const size_t last = n_steps - 1;
    if constexpr (std::is_same_v<Moment, float>) {
        if (journal == nullptr) {
            for (size_t step = 0; step <= last; ++step) apply(step, tile, tile);
            return;
        }
    }
    const AdamState saved{journal->saved, journal->saved + kTile, journal->saved + 2 * kTile};
    if (!is_saved(*journal)) {
        if (last == 0) copy(tile, saved, size);
        if (last > 0) apply(0, tile, saved);
        for (size_t step = 1; step < last; ++step) apply(step, saved, saved);
        mark_saved(*journal);
    }
    apply(last, saved, tile);
}

template <typename Moment, typename Gradient, typename Published>
void replay(const AnyState& any_state, size_t n, const WindowView& window, void* published, JournalEntry* journal) {
    const StateOf<Moment> state{any_state.master, static_cast<Moment*>(any_state.exp_avg),
                                static_cast<Moment*>(any_state.exp_avg_sq)};
    const size_t n_steps = window.n_steps, n_gradients = n_steps + (window.has_tentative ? 1 : 0);
    const bool predicts = window.prediction_steps != 0.0f;
    JournalEntry scratch;
    if (journal == nullptr && !std::is_same_v<Moment, float>) {
        scratch.position = 0;
        scratch.saved_at = kNothingSaved;
        journal = &scratch;
    }
    for (size_t begin = 0; begin < n; begin += kTile) {
        const size_t size = n - begin < kTile ? n - begin : kTile;
        const StateOf<Moment> tile = state + begin;
        Published* const target = static_cast<Published*>(published) + begin;
        const Noise noise{window.noise.seed, window.noise.first_element + static_cast<uint32_t>(begin)};
        const auto update_of = [&](size_t step) {
            const Gradient* const gradient = static_cast<const Gradient*>(window.gradients[step]) + begin;
            if (n_gradients > kStreams) prefetch(gradient + kPrefetchDistance);
            return Update<Gradient, Published>{gradient, window.coefficients + step, target, window.prediction_steps, size,
                                               noise};
        };
        const auto apply = [&](size_t step, const auto& from, const auto& to) {
            const auto update = update_of(step);
            if (step + 1 < n_gradients) return apply_step<false, Publish::kNothing>(from, to, update);
            if (predicts) return apply_step<false, Publish::kPredicted>(from, to, update);
            apply_step<false, Publish::kExact>(from, to, update);
        };
        if (n_steps > 0) update_tile(tile, n_steps, size, journal, apply);
        if (n_gradients == 0) publish(tile.master, target, size);
        if (window.has_tentative) {
            const auto update = update_of(n_steps);
            if (predicts) {
                apply_step<true, Publish::kPredicted>(tile, tile, update);
            } else {
                apply_step<true, Publish::kExact>(tile, tile, update);
            }
        }
        if (journal != nullptr) mark_done(*journal, size);
    }
}

template <typename Moment>
ReplayKernel select(DataType gradient_type, DataType published_type) {
    return with_type(gradient_type, [published_type](auto gradient) {
        return with_type(published_type,
                         [](auto published) -> ReplayKernel { return replay<Moment, decltype(gradient), decltype(published)>; });
    });
}

}  // namespace

ReplayKernel select_replay_kernel(DataType gradient, DataType published, DataType moments) {
    return moments == DataType::kBFloat16 ? select<BFloat16>(gradient, published) : select<float>(gradient, published);
}

}  // namespace ZENFLOW_ISA
}  // namespace zenflow
