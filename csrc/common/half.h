// 16-bit floating point as stored in gradient slots and publish buffers, and its conversion to and from float.
//
// Conversions to float are exact, those from float round to nearest, ties to even. Signs, subnormals and infinities are kept, NaN
// becomes NaN. They are branch-free integer and float operations, so that loops over them are vectorized for any instruction set.
#pragma once

#include <cstdint>

#include "common/cpu_features.h"
#include "common/protocol.h"

namespace zenflow {

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

ZENFLOW_INLINE uint32_t float_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
}

ZENFLOW_INLINE float float_from_bits(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}

ZENFLOW_INLINE float to_float(float value) { return value; }

ZENFLOW_INLINE float to_float(BFloat16 value) { return float_from_bits(static_cast<uint32_t>(value.bits) << 16); }

ZENFLOW_INLINE float to_float(Float16 value) {
    const uint32_t sign = (static_cast<uint32_t>(value.bits) & 0x8000u) << 16;
    const uint32_t magnitude = value.bits & 0x7fffu;
    // The exponent bias is 15 here and 127 there; an exponent of all ones (infinity, NaN) has to stay all ones.
    const uint32_t rebias = 112u << 23;
    const uint32_t normal = (magnitude << 13) + rebias + (magnitude >= 0x7c00u ? rebias : 0u);
    const uint32_t subnormal = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    return float_from_bits(sign | (magnitude < 0x0400u ? subnormal : normal));
}

template <typename T>
T from_float(float value) = delete;

template <>
ZENFLOW_INLINE float from_float<float>(float value) {
    return value;
}

template <>
ZENFLOW_INLINE BFloat16 from_float<BFloat16>(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const uint32_t quiet_nan = bits | 0x00400000u;
    return {static_cast<uint16_t>((value != value ? quiet_nan : rounded) >> 16)};
}

// As from_float, of a result of arithmetic: its NaN is quiet, which needs no selection here.
template <typename T>
ZENFLOW_INLINE T from_result(float value) {
    return from_float<T>(value);
}

template <>
ZENFLOW_INLINE BFloat16 from_result<BFloat16>(float value) {
    // Keeps the NaN of either sign that the addition would carry out of.
    constexpr uint32_t kLargestNan = 0x7fff0000u, kSign = 0x80000000u;
    const uint32_t bits = float_bits(value);
    const uint32_t below = bits < (kSign | kLargestNan) ? bits : (kSign | kLargestNan);
    const int32_t limit = static_cast<int32_t>(kLargestNan), as_signed = static_cast<int32_t>(below);
    const uint32_t limited = static_cast<uint32_t>(as_signed < limit ? as_signed : limit);
    return {static_cast<uint16_t>((limited + 0x7fffu + ((limited >> 16) & 1u)) >> 16)};
}

template <>
ZENFLOW_INLINE Float16 from_float<Float16>(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // 65536, the first power of two beyond the largest number, rounds to infinity's bits like everything above it.
    const uint32_t limited = magnitude < 0x47800000u ? magnitude : 0x47800000u;
    const uint32_t normal = (limited - (112u << 23) + 0x0fffu + ((limited >> 13) & 1u)) >> 13;
    // The distance between neighbours at 0.5f is 2^-24, a subnormal's unit: the addition itself rounds.
    const uint32_t subnormal = float_bits(float_from_bits(limited) + 0.5f) - float_bits(0.5f);
    const uint32_t finite = limited < (113u << 23) ? subnormal : normal;
    return {static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? 0x7e00u : finite))};
}

// Calls `function` with a value of the C++ type that `type` names.
template <typename Function>
ZENFLOW_INLINE auto with_type(DataType type, const Function& function) {
    if (type == DataType::kBFloat16) return function(BFloat16{});
    if (type == DataType::kFloat16) return function(Float16{});
    return function(0.0f);
}

}  // namespace zenflow
