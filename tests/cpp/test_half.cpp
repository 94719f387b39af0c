// half.h against tables of all 16-bit numbers, computed from the formats' definitions.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "common/half.h"

namespace zenflow {
namespace {

struct Format {
    int exponent_bits;
    int mantissa_bits;
};
constexpr Format kBFloat16Format{8, 7};
constexpr Format kFloat16Format{5, 10};

// The value that IEEE 754's definition gives the bits.
double value_of(Format format, uint16_t bits) {
    const int bias = (1 << (format.exponent_bits - 1)) - 1;
    const int exponent = (bits >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1);
    const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
    double magnitude;
    if (exponent == (1 << format.exponent_bits) - 1) {
        magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == 0) {
        magnitude = std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
    } else {
        magnitude = std::ldexp(mantissa + (1 << format.mantissa_bits), exponent - bias - format.mantissa_bits);
    }
    return (bits & 0x8000u) != 0 ? -magnitude : magnitude;
}

// Nearest of all numbers, ties to an even mantissa. Infinity takes the place of the next number beyond the largest.
class NearestSearch {
  public:
    explicit NearestSearch(Format format) {
        const uint16_t infinity = static_cast<uint16_t>(((1 << format.exponent_bits) - 1) << format.mantissa_bits);
        for (uint16_t bits = 0; bits < infinity; ++bits) magnitudes_.push_back(value_of(format, bits));
        const double largest = magnitudes_.back();
        magnitudes_.push_back(largest + (largest - magnitudes_[magnitudes_.size() - 2]));
    }

    // Bits of the number nearest to `value`, which is not NaN.
    uint16_t operator()(float value) const {
        const uint16_t sign = std::signbit(value) ? 0x8000u : 0u;
        const double magnitude = std::min(std::fabs(static_cast<double>(value)), magnitudes_.back());
        const auto above = std::lower_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
        auto index = static_cast<size_t>(above - magnitudes_.begin());
        if (*above != magnitude) {
            const double to_above = *above - magnitude;
            const double to_below = magnitude - magnitudes_[index - 1];
            if (to_below < to_above || (to_below == to_above && (index - 1) % 2 == 0)) --index;
        }
        return static_cast<uint16_t>(sign | index);
    }

  private:
    std::vector<double> magnitudes_;  // index: bits
};

template <typename T>
void check_to_float(Format format) {
    for (uint32_t bits = 0; bits <= 0xffffu; ++bits) {
        const double expected = value_of(format, static_cast<uint16_t>(bits));
        const float actual = to_float(T{static_cast<uint16_t>(bits)});
        if (std::isnan(expected)) {
            CHECK(std::isnan(actual));
        } else {
            CHECK_EQ(static_cast<double>(actual), expected);
        }
        CHECK_EQ(std::signbit(actual), (bits & 0x8000u) != 0);
    }
}

template <typename T>
void check_from_float(Format format) {
    const NearestSearch nearest(format);
    const auto check = [&](float value) {
        const T actual = from_float<T>(value);
        if (std::isnan(value)) {
            CHECK(std::isnan(value_of(format, actual.bits)));
        } else {
            CHECK_EQ(actual.bits, nearest(value));
        }
    };
    for (uint32_t bits = 0; bits <= 0xffffu; ++bits) {
        // Each number, the points halfway to its neighbours, and the floats next to those.
        const double number = value_of(format, static_cast<uint16_t>(bits));
        if (!std::isfinite(number)) continue;
        const auto value = static_cast<float>(number);
        CHECK_EQ(from_float<T>(value).bits, bits);
        const double next = value_of(format, static_cast<uint16_t>(bits + 1));
        const auto halfway = static_cast<float>(std::isfinite(next) ? (number + next) / 2 : number);
        check(halfway);
        check(std::nextafterf(halfway, -std::numeric_limits<float>::infinity()));
        check(std::nextafterf(halfway, std::numeric_limits<float>::infinity()));
    }
    for (const float value : {0.0f, -0.0f, 65504.0f, 65519.996f, 65520.0f, 65536.0f, -65520.0f, 1e10f, 3.3895314e38f, 3.39e38f,
                              0x1p-24f, 0x1p-25f, 0x1.000002p-25f, 0x1p-26f, 0x1p-126f, 0x1p-149f, -0x1p-149f}) {
        check(value);
    }
    check(std::numeric_limits<float>::max());
    check(std::numeric_limits<float>::lowest());
    check(std::numeric_limits<float>::infinity());
    check(-std::numeric_limits<float>::infinity());
    for (const uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
        check(float_from_bits(nan));
    }
    std::mt19937 random(1);
    for (int i = 0; i < 200000; ++i) check(float_from_bits(static_cast<uint32_t>(random())));
}

TEST(half, bfloat16_to_float) { check_to_float<BFloat16>(kBFloat16Format); }
TEST(half, float16_to_float) { check_to_float<Float16>(kFloat16Format); }
TEST(half, float_to_bfloat16) { check_from_float<BFloat16>(kBFloat16Format); }

// The same bits, but for signalling NaNs, which no arithmetic gives.
TEST(half, result_to_bfloat16) {
    const auto check = [](uint32_t bits) {
        const float value = float_from_bits(bits);
        const BFloat16 actual = from_result<BFloat16>(value);
        if (std::isnan(value)) {
            CHECK(std::isnan(to_float(actual)));
        } else {
            CHECK_EQ(actual.bits, from_float<BFloat16>(value).bits);
        }
    };
    for (uint32_t high = 0; high <= 0xffffu; ++high) {
        const bool signalling = (high & 0x7fffu) >= 0x7f80u && (high & 0x0040u) == 0;
        for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            if (!signalling || (high & 0x007fu) + low == 0) check(high << 16 | low);
        }
    }
}

TEST(half, float_to_float16) { check_from_float<Float16>(kFloat16Format); }

}  // namespace
}  // namespace zenflow
