// half.h against the formats' definitions: all 16-bit numbers, and the floats around each border between two of them.
#include <cmath>
#include <cstdint>
#include <limits>

#include "check.h"
#include "common/half.h"

namespace zenflow {
namespace {

struct Format {
    int exponent_bits;
    int mantissa_bits;

    uint16_t infinity() const { return static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits); }
};
constexpr Format kBFloat16Format{8, 7};
constexpr Format kFloat16Format{5, 10};

// The value that IEEE 754's definition gives the bits of a positive number; infinity's are those of the next one beyond the
// largest.
double value_of(Format format, uint32_t bits) {
    const int exponent = static_cast<int>(bits) >> format.mantissa_bits;
    const int mantissa = static_cast<int>(bits) & ((1 << format.mantissa_bits) - 1);
    const int scale = 2 - (1 << (format.exponent_bits - 1)) - format.mantissa_bits;
    return exponent == 0 ? std::ldexp(mantissa, scale) : std::ldexp(mantissa + (1 << format.mantissa_bits), scale + exponent - 1);
}

template <typename T>
void check_to_float(Format format) {
    for (uint32_t bits = 0; bits <= 0x7fffu; ++bits) {
        for (const uint32_t sign : {0u, 0x8000u}) {
            const float actual = to_float(T{static_cast<uint16_t>(bits | sign)});
            CHECK_EQ(std::signbit(actual), sign != 0);
            if (bits < format.infinity()) CHECK_EQ(std::fabs(static_cast<double>(actual)), value_of(format, bits));
            if (bits == format.infinity()) CHECK(std::isinf(actual));
            if (bits > format.infinity()) CHECK(std::isnan(actual));
        }
    }
}

// The nearest number, ties to an even mantissa.
template <typename T>
void check_from_float(Format format) {
    const float infinity = std::numeric_limits<float>::infinity();
    const auto check = [](float value, uint32_t bits) {
        CHECK_EQ(from_float<T>(value).bits, bits);
        CHECK_EQ(from_float<T>(-value).bits, bits | 0x8000u);
    };
    for (uint32_t bits = 0; bits < format.infinity(); ++bits) {
        const double number = value_of(format, bits), next = value_of(format, bits + 1);
        const auto border = static_cast<float>((number + next) / 2);
        check(static_cast<float>(number), bits);
        check(border, bits + bits % 2);
        check(std::nextafterf(border, 0.0f), bits);
        check(std::nextafterf(border, infinity), bits + 1);
    }
    check(std::numeric_limits<float>::max(), format.infinity());
    check(infinity, format.infinity());
    for (const uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
        CHECK(std::isnan(to_float(from_float<T>(float_from_bits(nan)))));
    }
}

TEST(half, to_float) {
    check_to_float<BFloat16>(kBFloat16Format);
    check_to_float<Float16>(kFloat16Format);
}

TEST(half, from_float) {
    check_from_float<BFloat16>(kBFloat16Format);
    check_from_float<Float16>(kFloat16Format);
}

// The same bits, but for signalling NaNs, which no arithmetic gives.
TEST(half, result_to_bfloat16) {
    for (uint32_t high = 0; high <= 0xffffu; ++high) {
        const bool signalling = (high & 0x7fffu) >= 0x7f80u && (high & 0x0040u) == 0;
        for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            if (signalling && (high & 0x007fu) + low != 0) continue;
            const float value = float_from_bits(high << 16 | low);
            const BFloat16 actual = from_result<BFloat16>(value);
            CHECK(std::isnan(value) ? std::isnan(to_float(actual)) : actual.bits == from_float<BFloat16>(value).bits);
        }
    }
}

}  // namespace
}  // namespace zenflow
