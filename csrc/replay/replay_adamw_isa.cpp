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

// In elements. The hardware's prefetchers stop at each page of 4 KiB, and follow a limited number of streams.
constexpr size_t kPrefetchDistance = 512;

// Of an update's weights. The last update of a window publishes in the same pass, which saves a second square root and division.
enum class Publish { kNothing, kExact, kPredicted };

// What a step writes to the state: an update its result, a tentative step what it has read, so that it completes the update
// before in the same pass, or nothing.
enum class Store { kResult, kInput, kNothing };

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

ZENFLOW_INLINE void store(float* exp_avg, float* exp_avg_sq, float m, float v, uint32_t) {
    *exp_avg = m;
    *exp_avg_sq = v;
}

ZENFLOW_INLINE void store(BFloat16* exp_avg, BFloat16* exp_avg_sq, float m, float v, uint32_t counter) {
    *exp_avg = from_result<BFloat16>(m);
    *exp_avg_sq = round_stochastically(v, noise_of(counter));
}

// Of moments that a step before has computed.
template <typename To>
ZENFLOW_INLINE void store_input(const AdamState& from, const StateOf<To>& to, const Noise& noise, size_t n) {
    const float *const w_from = from.master, *const m_from = from.exp_avg, *const v_from = from.exp_avg_sq;
    float* const w_to = to.master;
    To *const m_to = to.exp_avg, *const v_to = to.exp_avg_sq;
    uint32_t counter = noise_counter(noise.seed, noise.first_element);
#pragma omp simd
    for (size_t i = 0; i < n; ++i) w_to[i] = w_from[i];
#pragma omp simd linear(counter : kNoiseStride)
    for (size_t i = 0; i < n; ++i) {
        store(m_to + i, v_to + i, m_from[i], v_from[i], counter);
        counter += kNoiseStride;
    }
}

// `from` and `to` are the same or do not overlap.
//
// Divisions and square roots take longest. What needs none, copies and most conversions to 16 bits, is in loops of its own before
// and after: it would fill the CPU's window of instructions and leave no room for the next elements' divisions.
template <Decay kDecay, Store kStore, Publish kPublish, typename From, typename To, typename Gradient, typename Published>
void apply_step(const StateOf<From>& from, const StateOf<To>& to, const Update<Gradient, Published>& update) {
    const StepCoefficients c = *update.coefficients;
    const float* const w_from = from.master;
    const From *const m_from = from.exp_avg, *const v_from = from.exp_avg_sq;
    float* const w_to = to.master;
    To *const m_to = to.exp_avg, *const v_to = to.exp_avg_sq;
    // Not a function of `i`: 64-bit indices would be converted to 32 bits in vectors.
    uint32_t counter = noise_counter(update.noise.seed, update.noise.first_element);
    const Gradient* const gradient = update.gradient;
    Published* const published = update.published;
    const float distance = update.prediction_steps * c.step_size;
    const size_t n = update.n;
    alignas(64) float shown[kTile];
    if constexpr (kStore == Store::kInput) store_input(from, to, update.noise, n);
#pragma omp simd linear(counter : kNoiseStride)
    for (size_t i = 0; i < n; ++i) {
        float w = w_from[i];
        const float m_before = to_float(m_from[i]), v_before = to_float(v_from[i]);
        float g = to_float(gradient[i]) * c.grad_scale;
        if constexpr (kDecay == Decay::kGradient) g = __builtin_fmaf(w, c.decay_factor, g);
        const float m = __builtin_fmaf(g, c.one_minus_beta1, m_before * c.beta1);
        const float v = __builtin_fmaf(g * g, c.one_minus_beta2, v_before * c.beta2);
        const float u = m / __builtin_fmaf(__builtin_sqrtf(v), c.inv_sqrt_bias_correction2, c.eps);
        if constexpr (kDecay == Decay::kWeight) w = __builtin_fmaf(w, c.decay_factor, w);
        w = __builtin_fmaf(u, c.step_size, w);
        if constexpr (kStore == Store::kResult) {
            w_to[i] = w;
            store(m_to + i, v_to + i, m, v, counter);
        }
        if constexpr (kPublish == Publish::kExact) shown[i] = w;
        if constexpr (kPublish == Publish::kPredicted) shown[i] = __builtin_fmaf(u, distance, w);
        counter += kNoiseStride;
    }
    if constexpr (kPublish != Publish::kNothing) {
#pragma omp simd
        for (size_t i = 0; i < n; ++i) published[i] = from_result<Published>(shown[i]);
    }
}

template <Store kStore, Publish kPublish, typename From, typename To, typename Gradient, typename Published>
void apply_step(const StateOf<From>& from, const StateOf<To>& to, const Update<Gradient, Published>& update) {
    switch (update.coefficients->decay) {
        case Decay::kNone:
            return apply_step<Decay::kNone, kStore, kPublish>(from, to, update);
        case Decay::kGradient:
            return apply_step<Decay::kGradient, kStore, kPublish>(from, to, update);
        case Decay::kWeight:
            return apply_step<Decay::kWeight, kStore, kPublish>(from, to, update);
    }
}

// The last step of a window.
template <Store kStore, typename From, typename To, typename Gradient, typename Published>
void apply_and_publish(const StateOf<From>& from, const StateOf<To>& to, const Update<Gradient, Published>& update) {
    if (update.prediction_steps == 0.0f) return apply_step<kStore, Publish::kExact>(from, to, update);
    apply_step<kStore, Publish::kPredicted>(from, to, update);
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

// Of one of a tile's arrays, a few tiles ahead. Beyond the end of the array it is harmless: a prefetch never faults.
template <typename Element>
void prefetch(const Element* tile) {
    const char* const begin = reinterpret_cast<const char*>(tile + kPrefetchDistance);
    for (size_t byte = 0; byte < kTile * sizeof(Element); byte += 64) __builtin_prefetch(begin + byte);
}

// Applies a window with a committed part to a tile, in the order that tile_journal.h prescribes. Without a journal, which only
// float moments can do without, the tile itself takes the place of the journal's.
template <typename Moment, typename UpdateOf>
void update_tile(const StateOf<Moment>& tile, size_t n_steps, bool has_tentative, size_t size, JournalEntry* journal,
                 const UpdateOf& update_of) {
    const size_t last = n_steps - (has_tentative ? 0 : 1);
    AdamState saved{};
    if (journal != nullptr) saved = {journal->saved, journal->saved + kTile, journal->saved + 2 * kTile};
    if constexpr (std::is_same_v<Moment, float>) {
        if (journal == nullptr) saved = tile;
    }
    if (journal == nullptr || !is_saved(*journal)) {
        if (last > 0) apply_step<Store::kResult, Publish::kNothing>(tile, saved, update_of(0));
        for (size_t step = 1; step < last; ++step) {
            apply_step<Store::kResult, Publish::kNothing>(saved, saved, update_of(step));
        }
        if (journal != nullptr) {
            if (last == 0) copy(tile, saved, size);
            mark_saved(*journal);
        }
    }
    if (has_tentative) return apply_and_publish<Store::kInput>(saved, tile, update_of(last));
    apply_and_publish<Store::kResult>(saved, tile, update_of(last));
}

template <typename Moment, typename Gradient, typename Published>
void replay(const AnyState& any_state, size_t n, const WindowView& window, void* published, JournalEntry* journal) {
    const StateOf<Moment> state{any_state.master, static_cast<Moment*>(any_state.exp_avg),
                                static_cast<Moment*>(any_state.exp_avg_sq)};
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
        const auto update_of = [&](size_t step) {
            const Gradient* const gradient = static_cast<const Gradient*>(window.gradients[step]) + begin;
            prefetch(gradient);
            const Noise noise{window.noise.seed, window.noise.first_element + static_cast<uint32_t>(begin)};
            return Update<Gradient, Published>{gradient, window.coefficients + step, target, window.prediction_steps, size,
                                               noise};
        };
        prefetch(tile.master);
        prefetch(tile.exp_avg);
        prefetch(tile.exp_avg_sq);
        if (window.n_steps > 0) {
            update_tile(tile, window.n_steps, window.has_tentative, size, journal, update_of);
        } else if (window.has_tentative) {
            apply_and_publish<Store::kNothing>(tile, tile, update_of(0));
        } else {
            publish(tile.master, target, size);
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
