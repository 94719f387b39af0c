// half.h against the formats' definitions: all 16-bit numbers, and the floats around each border between two of them.
// Stochastic rounding to bfloat16: unbiased for each second moment. Its noise, and that of 8 bits: uniform and uncorrelated.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "adamw/stochastic_rounding.h"
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

// Of `n` independent numbers with the given deviation; 5 deviations are exceeded once in 2 million.
double bound(double deviation, size_t n) { return 5.0 * deviation / std::sqrt(static_cast<double>(n)); }

TEST(stochastic_rounding, each_value_is_rounded_up_by_as_much_noise_as_it_is_above_its_lower_neighbour) {
    for (const uint32_t bits : {0x00000001u, 0x0000ffffu, 0x358637bdu, 0x3f800000u, 0x3f80ffffu, 0x7f7f8000u}) {
        uint32_t n_up = 0;
        for (uint32_t noise = 0; noise < 65536; ++noise) {
            const uint16_t rounded = round_stochastically(float_from_bits(bits), noise).bits;
            CHECK(rounded == bits >> 16 || rounded == (bits >> 16) + 1);
            n_up += rounded == bits >> 16 ? 0 : 1;
        }
        CHECK_EQ(n_up, bits % 65536);
    }
    const float infinity = std::numeric_limits<float>::infinity();
    CHECK_EQ(to_float(round_stochastically(infinity, 65535)), infinity);
    for (const uint32_t bits : {0x7fc00001u, 0x7fffffffu, 0xffc00000u, 0xffffffffu}) {
        for (const uint32_t noise : {0u, 65535u}) {
            CHECK(std::isnan(to_float(round_stochastically(float_from_bits(bits), noise))));
        }
    }
}

// Over the elements of one step and over the steps of one element: mean, mean square, and correlation of successive numbers.
TEST(stochastic_rounding, noise_is_uniform_and_uncorrelated) {
    constexpr size_t kN = 1 << 20;
    const auto check = [](auto noise_at) {
        double sum = 0.0, squares = 0.0, products = 0.0, last = 0.0;
        std::vector<int> n_in(64);
        for (size_t i = 0; i < kN; ++i) {
            const uint32_t noise = noise_at(i);
            CHECK(noise < 65536);
            const double x = (noise + 0.5) / 65536 - 0.5;
            sum += x, squares += x * x, products += x * last;
            last = x;
            ++n_in[noise / 1024];
        }
        CHECK(std::fabs(sum / kN) < bound(std::sqrt(1.0 / 12), kN));
        CHECK(std::fabs(squares / kN - 1.0 / 12) < bound(std::sqrt(1.0 / 180), kN));
        CHECK(std::fabs(products / kN) < bound(1.0 / 12, kN));
        for (const int n : n_in) CHECK(std::fabs(n / (kN / 64.0) - 1.0) < bound(1.0, kN / 64));
    };
    for (const uint64_t step : {1, 1000000}) {
        const uint32_t seed = noise_seed(step);
        check([seed](size_t i) { return noise_of(noise_counter(seed, static_cast<uint32_t>(i))); });
        check([seed](size_t i) { return other_noise_of(noise_counter(seed, static_cast<uint32_t>(i))); });
    }
    for (const uint32_t element : {0u, 0xffffffffu}) {
        check([element](size_t i) { return noise_of(noise_counter(noise_seed(i), element)); });
        check([element](size_t i) { return other_noise_of(noise_counter(noise_seed(i), element)); });
    }
}

}  // namespace
}  // namespace zenflow
