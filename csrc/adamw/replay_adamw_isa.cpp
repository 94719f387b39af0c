// The kernel of replay_adamw.h, compiled once per instruction set (cpu_features.h).
#include "adamw/moments_in_8_bits.h"
#include "adamw/replay_adamw.h"
#include "adamw/stochastic_rounding.h"
#include "adamw/tile_journal.h"
#include "common/half.h"

namespace zenflow {
namespace ZENFLOW_ISA {
namespace {

// Small enough for an out-of-order CPU to start the next tile while it copies and publishes this one: with 512 elements the
// journal adds half to the time of four steps, with 128 a few percent.
constexpr size_t kTile = kTileElements;

// In elements. The hardware's prefetchers stop at each page of 4 KiB, and follow a limited number of streams.
constexpr size_t kPrefetchDistance = 512;

// Of 1 - beta1: a step changes exp_avg by less than half of bfloat16's spacing.
constexpr float kSlow = 0x1p-8f;

// Of an update's weights. The last update of a window publishes in the same pass, which saves a second square root and division.
enum class Publish { kNothing, kExact, kPredicted };

// What a step writes to the state: an update its result, a tentative step nothing.
enum class Store { kResult, kNothing };

// One step on one tile.
template <typename T>
struct Update {
    const T* gradient;
    const StepCoefficients* coefficients;
    T* published;
    float prediction_steps;
    size_t n;
};

// The moments of a tile as floats. (The master weights are floats in the arena as well.)
template <typename Moment>
void decode(const StateOf<Moment>& from, const AdamState& to, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
        to.exp_avg[i] = to_float(from.exp_avg[i]);
        to.exp_avg_sq[i] = to_float(from.exp_avg_sq[i]);
    }
}

void decode(const StateOf<int8_t>& from, const AdamState& to, size_t n) {
    const MomentScales scales = *from.scales;
    const float root_scale = __builtin_sqrtf(scales.exp_avg_sq);
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
        to.exp_avg[i] = decode_exp_avg(from.exp_avg[i], scales.exp_avg, decode_root(from.exp_avg_sq[i], root_scale));
        to.exp_avg_sq[i] = decode_exp_avg_sq(from.exp_avg_sq[i], scales.exp_avg_sq);
    }
}

// Rounds a tile's moments to the type of the arena.
void encode(const AdamState& from, const AdamState& to, const Noise&, size_t n) { decode(from, to, n); }

void encode(const AdamState& from, const StateOf<BFloat16>& to, const Noise& noise, size_t n) {
    // Not a function of `i`: 64-bit indices would be converted to 32 bits in vectors.
    uint32_t counter = noise_counter(noise.seed, noise.first_element);
#pragma omp simd linear(counter : kNoiseStride)
    for (size_t i = 0; i < n; ++i) {
        to.exp_avg[i] = from_result<BFloat16>(from.exp_avg[i]);
        to.exp_avg_sq[i] = round_stochastically(from.exp_avg_sq[i], noise_of(counter));
        counter += kNoiseStride;
    }
    if (!noise.of_slow_exp_avg) return;
    counter = noise_counter(noise.seed, noise.first_element);
#pragma omp simd linear(counter : kNoiseStride)
    for (size_t i = 0; i < n; ++i) {
        to.exp_avg[i] = round_signed_stochastically(from.exp_avg[i], other_noise_of(counter));
        counter += kNoiseStride;
    }
}

void encode(const AdamState& from, const StateOf<int8_t>& to, const Noise& noise, size_t n) {
    // Bytes may be parts of anything, also of the structures that hold the pointers.
    const float *const m_from = from.exp_avg, *const v_from = from.exp_avg_sq;
    int8_t* const m_to = to.exp_avg;
    uint8_t* const v_to = to.exp_avg_sq;
    uint32_t largest_v = 0, largest_ratio = 0;
#pragma omp simd reduction(max : largest_v)
    for (size_t i = 0; i < n; ++i) {
        const uint32_t v = float_bits(v_from[i]);
        largest_v = v > largest_v ? v : largest_v;
    }
    const float scale_v = scale_of(largest_v), inverse_v = 1.0f / scale_v, root_scale = __builtin_sqrtf(scale_v);
    alignas(64) float shares[kTile], ratios[kTile];
#pragma omp simd reduction(max : largest_ratio)
    for (size_t i = 0; i < n; ++i) {
        const float m = m_from[i], v = v_from[i], share = root_share(v, inverse_v);
        shares[i] = (m == 0.0f) & (v == 0.0f) ? 0.0f : share;
        ratios[i] = m / (share * root_scale);
        const uint32_t ratio = float_bits(ratios[i]) & 0x7fffffffu;
        largest_ratio = ratio > largest_ratio ? ratio : largest_ratio;
    }
    const float ratio = bounded_ratio(largest_ratio), inverse_ratio = 127.0f * 127.0f / ratio;
    uint32_t counter = noise_counter(noise.seed, noise.first_element);
#pragma omp simd linear(counter : kNoiseStride)
    for (size_t i = 0; i < n; ++i) {
        m_to[i] = static_cast<int8_t>(encode_exp_avg(ratios[i], inverse_ratio, other_noise_of(counter)));
        v_to[i] = static_cast<uint8_t>(encode_exp_avg_sq(shares[i], noise_of(counter)));
        counter += kNoiseStride;
    }
    *to.scales = {scale_of_ratio(ratio), scale_v};
}

void copy_master(const float* from, float* to, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) to[i] = from[i];
}

// `from` and `to` are the same or do not overlap.
//
// Divisions and square roots take longest. What needs none, copies and conversions, is in loops of its own before and after: it
// would fill the CPU's window of instructions and leave no room for the next elements' divisions.
template <Decay kDecay, Store kStore, Publish kPublish, typename T>
void apply_step(const AdamState& from, const AdamState& to, const Update<T>& update) {
    const StepCoefficients c = *update.coefficients;
    const float *const w_from = from.master, *const m_from = from.exp_avg, *const v_from = from.exp_avg_sq;
    float *const w_to = to.master, *const m_to = to.exp_avg, *const v_to = to.exp_avg_sq;
    const T* const gradient = update.gradient;
    T* const published = update.published;
    const float distance = update.prediction_steps * c.step_size;
    const size_t n = update.n;
    alignas(64) float shown[kTile];
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
        float w = w_from[i];
        float g = to_float(gradient[i]) * c.grad_scale;
        if constexpr (kDecay == Decay::kGradient) g = __builtin_fmaf(w, c.decay_factor, g);
        const float m = __builtin_fmaf(g, c.one_minus_beta1, m_from[i] * c.beta1);
        const float v = __builtin_fmaf(g * g, c.one_minus_beta2, v_from[i] * c.beta2);
        const float u = m / __builtin_fmaf(__builtin_sqrtf(v), c.inv_sqrt_bias_correction2, c.eps);
        if constexpr (kDecay == Decay::kWeight) w = __builtin_fmaf(w, c.decay_factor, w);
        w = __builtin_fmaf(u, c.step_size, w);
        if constexpr (kStore == Store::kResult) {
            w_to[i] = w;
            m_to[i] = m;
            v_to[i] = v;
        }
        if constexpr (kPublish == Publish::kExact) shown[i] = w;
        if constexpr (kPublish == Publish::kPredicted) shown[i] = __builtin_fmaf(u, distance, w);
    }
    if constexpr (kPublish != Publish::kNothing) {
#pragma omp simd
        for (size_t i = 0; i < n; ++i) published[i] = from_result<T>(shown[i]);
    }
}

template <Store kStore, Publish kPublish, typename T>
void apply_step(const AdamState& from, const AdamState& to, const Update<T>& update) {
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
template <Store kStore, typename T>
void apply_and_publish(const AdamState& from, const AdamState& to, const Update<T>& update) {
    if (update.prediction_steps == 0.0f) return apply_step<kStore, Publish::kExact>(from, to, update);
    apply_step<kStore, Publish::kPredicted>(from, to, update);
}

template <typename T>
void publish(const float* __restrict master, T* __restrict published, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) published[i] = from_float<T>(master[i]);
}

// Of one of a tile's arrays, a few tiles ahead. Beyond the end of the array it is harmless: a prefetch never faults.
template <typename Element>
void prefetch(const Element* tile) {
    const char* const begin = reinterpret_cast<const char*>(tile + kPrefetchDistance);
    for (size_t byte = 0; byte < kTile * sizeof(Element); byte += 64) __builtin_prefetch(begin + byte);
}

// Applies a window with a committed part to a tile, in the order that tile_journal.h prescribes.
template <typename Moment, typename UpdateOf>
void update_tile(const StateOf<Moment>& tile, const Noise& noise, size_t n_steps, bool has_tentative, size_t size,
                 JournalEntry& journal, const UpdateOf& update_of) {
    constexpr bool kIsFloat = std::is_same_v<Moment, float>;
    const size_t last = n_steps - (has_tentative ? 0 : 1);
    const AdamState saved{journal.saved, journal.saved + kTile, journal.saved + 2 * kTile};
    if (!is_saved(journal)) {
        size_t step = 0;
        if constexpr (kIsFloat) {
            if (last > 0) apply_step<Store::kResult, Publish::kNothing>(tile, saved, update_of(step++));
        }
        if (step == 0) {
            copy_master(tile.master, saved.master, size);
            decode(tile, saved, size);
        }
        for (; step < last; ++step) apply_step<Store::kResult, Publish::kNothing>(saved, saved, update_of(step));
        mark_saved(journal);
    }
    if (has_tentative) {
        copy_master(saved.master, tile.master, size);
        encode(saved, tile, noise, size);
        return apply_and_publish<Store::kNothing>(saved, saved, update_of(last));
    }
    if constexpr (kIsFloat) {
        apply_and_publish<Store::kResult>(saved, tile, update_of(last));
    } else {
        alignas(64) float moments[2][kTile];
        const AdamState result{tile.master, moments[0], moments[1]};
        apply_and_publish<Store::kResult>(saved, result, update_of(last));
        encode(result, tile, noise, size);
    }
}

// Publishes a tentative step alone, from the tile as it is.
template <typename Moment, typename T>
void show_tile(const StateOf<Moment>& tile, const Update<T>& update) {
    if constexpr (std::is_same_v<Moment, float>) {
        apply_and_publish<Store::kNothing>(tile, tile, update);
    } else {
        alignas(64) float moments[2][kTile];
        const AdamState state{tile.master, moments[0], moments[1]};
        decode(tile, state, update.n);
        apply_and_publish<Store::kNothing>(state, state, update);
    }
}

template <typename Moment, typename T>
void replay(const AnyState& any_state, size_t n, const WindowView& window, void* published, JournalEntry& journal) {
    using Second = std::remove_pointer_t<decltype(StateOf<Moment>::exp_avg_sq)>;
    const StateOf<Moment> state{any_state.master, static_cast<Moment*>(any_state.exp_avg),
                                static_cast<Second*>(any_state.exp_avg_sq), any_state.scales};
    for (size_t begin = 0; begin < n; begin += kTile) {
        const size_t size = n - begin < kTile ? n - begin : kTile;
        const StateOf<Moment> tile = state + begin;
        T* const target = static_cast<T*>(published) + begin;
        const auto update_of = [&](size_t step) {
            const T* const gradient = static_cast<const T*>(window.gradients[step]) + begin;
            prefetch(gradient);
            return Update<T>{gradient, window.coefficients + step, target, window.prediction_steps, size};
        };
        prefetch(tile.master);
        prefetch(tile.exp_avg);
        prefetch(tile.exp_avg_sq);
        if (window.n_steps > 0) {
            const bool is_slow = window.coefficients[window.n_steps - 1].one_minus_beta1 < kSlow;
            const Noise noise{window.noise.seed, window.noise.first_element + static_cast<uint32_t>(begin), is_slow};
            update_tile(tile, noise, window.n_steps, window.has_tentative, size, journal, update_of);
        } else if (window.has_tentative) {
            show_tile(tile, update_of(0));
        } else {
            publish(tile.master, target, size);
        }
        mark_done(journal, size);
    }
}

template <typename Moment>
ReplayKernel select(DataType model) {
    return with_type(model, [](auto value) -> ReplayKernel { return replay<Moment, decltype(value)>; });
}

}  // namespace

ReplayKernel select_replay_kernel(DataType model, DataType moments) {
    if (moments == DataType::kInt8) return select<int8_t>(model);
    return moments == DataType::kBFloat16 ? select<BFloat16>(model) : select<float>(model);
}

}  // namespace ZENFLOW_ISA
}  // namespace zenflow
