// Invariants of the 8-bit code of moments, over all codes, exponents of scales, signs and extremes of the noise.
#include <cmath>
#include <limits>
#include <vector>

#include "adamw/moments_in_8_bits.h"
#include "adamw/replay_adamw.h"
#include "check.h"
#include "reference_adamw.h"

namespace zenflow {
namespace {

constexpr uint32_t kNoises[] = {0, 1, 32767, 32768, 65534, 65535};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <int n>
void check_squares() {
    constexpr float kLargest = n * n;
    // Order: a larger square never has a smaller code.
    for (const uint32_t noise : kNoises) {
        int32_t last = 0;
        for (uint32_t bits = 0; bits <= float_bits(kLargest); bits += 997) {
            const int32_t code = code_of_square<n>(float_from_bits(bits), noise);
            CHECK(code >= last && code <= n);
            last = code;
        }
        CHECK_EQ(code_of_square<n>(0.0f, noise), 0);
        // The largest element is exact, although a product with an inverse rounds.
        for (const float largest : {kLargest, kLargest * (1.0f - 0x1p-24f), kLargest * (1.0f + 0x1p-23f), kInfinity}) {
            CHECK_EQ(code_of_square<n>(largest, noise), n);
        }
        const int32_t of_nan = code_of_square<n>(std::nanf(""), noise);
        CHECK(of_nan >= 0 && of_nan <= n);
    }
    CHECK_EQ(square_of_code<n>(n), 1.0f);
    for (int32_t code = 0; code < n; ++code) {
        const auto low = static_cast<float>(code * code), high = static_cast<float>((code + 1) * (code + 1));
        CHECK_EQ(code_of_square<n>(square_of_code<n>(code) * kLargest, 32768), code);
        for (const float fraction : {0.001f, 0.25f, 0.5f, 0.9f, 0.999f}) {
            const float square = low + fraction * (high - low);
            // No bias: the upper neighbour for as much of the noise as the square is above the lower one.
            uint32_t n_up = 0;
            for (uint32_t bit = 32768; bit > 0; bit /= 2) n_up += code_of_square<n>(square, n_up + bit - 1) > code ? bit : 0;
            CHECK(std::fabs(n_up - 65536.0 * (square - low) / (high - low)) <= 1.01);
            for (const uint32_t noise : kNoises) {
                CHECK_EQ(code_of_square<n>(square, noise), code + (noise < n_up ? 1 : 0));
            }
        }
    }
}

TEST(moments_in_8_bits, squares_are_rounded_without_bias_and_in_order) {
    check_squares<127>();
    check_squares<255>();
}

TEST(moments_in_8_bits, scales_have_bounds_and_keep_nan) {
    CHECK_EQ(scale_of(float_bits(kInfinity)), std::numeric_limits<float>::max());
    CHECK_EQ(scale_of(float_bits(std::numeric_limits<float>::max())), std::numeric_limits<float>::max());
    for (const float small : {0.0f, 0x1p-149f, 0x1.fffffep-101f}) CHECK_EQ(scale_of(float_bits(small)), 0x1p-100f);
    CHECK_EQ(scale_of(float_bits(0x1.000002p-100f)), 0x1.000002p-100f);
    CHECK_EQ(bounded_ratio(float_bits(kInfinity)), 0x1p126f);
    for (const float small : {0.0f, 0x1p-149f, 0x1.fffffep-41f}) CHECK_EQ(bounded_ratio(float_bits(small)), 0x1p-40f);
    for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu}) {
        CHECK(std::isnan(scale_of(bits)));
        CHECK(std::isnan(scale_of_ratio(bounded_ratio(bits))));
    }
}

TEST(moments_in_8_bits, a_scale_is_found_again_from_what_it_decodes) {
    for (int exponent = -40; exponent < 126; ++exponent) {
        for (uint32_t i = 0; i <= 1000; ++i) {
            const float ratio = bounded_ratio(float_bits(std::ldexp(1.0f + static_cast<float>(i) / 1000.0f, exponent)));
            const float scale = scale_of_ratio(ratio);
            CHECK(std::fabs(scale / ratio - 1.0f) <= 0x1p-16f);
            CHECK(scale >= 0x1p-40f && scale <= 0x1p126f);
            // Some operations that round lie between.
            for (const float error : {-0x1p-20f, 0.0f, 0x1p-20f}) CHECK_EQ(scale_of_ratio(scale * (1.0f + error)), scale);
        }
    }
}

TEST(moments_in_8_bits, signs_and_zeros_are_kept) {
    for (const uint32_t noise : kNoises) {
        for (const float ratio : {0x1p-149f, 1e-6f, 0.3f, 16129.0f}) {
            CHECK_EQ(encode_exp_avg(-ratio, 1.0f, noise), -encode_exp_avg(ratio, 1.0f, noise));
            CHECK(encode_exp_avg(ratio, 1.0f, noise) >= 0);
        }
        for (const float zero : {0.0f, -0.0f}) CHECK_EQ(encode_exp_avg(zero, 1.0f, noise), 0);
        CHECK_EQ(encode_exp_avg_sq(0.0f, noise), 0);
        for (const float v : {0.0f, 0x1p-149f, 1e-30f}) CHECK_EQ(encode_exp_avg_sq(root_share(v, 1.0f), noise), 1);
    }
    for (int32_t q = -127; q <= 127; ++q) {
        CHECK_EQ(decode_exp_avg(static_cast<int8_t>(-q), 0.7f, 0.3f), -decode_exp_avg(static_cast<int8_t>(q), 0.7f, 0.3f));
    }
}

// No product becomes subnormal or infinite, so that decoded values keep their precision: all codes, all exponents of scales.
TEST(moments_in_8_bits, decoded_ratios_are_those_of_their_codes) {
    for (int exponent = -100; exponent < 128; ++exponent) {
        const float scale_v = std::ldexp(1.0f, exponent), root_scale = std::sqrt(scale_v);
        for (int of_ratio = -40; of_ratio <= 126 && of_ratio + exponent / 2 < 126; of_ratio += 2) {
            const float scale = std::ldexp(1.0f, of_ratio);
            for (int32_t c = 1; c <= 255; c += 2) {
                const float root = decode_root(static_cast<uint8_t>(c), root_scale);
                CHECK(std::fabs(std::sqrt(decode_exp_avg_sq(static_cast<uint8_t>(c), scale_v)) / root - 1.0f) < 0x1p-16f);
                for (const int32_t q : {1, 2, 63, 126, 127}) {
                    const float m = decode_exp_avg(static_cast<int8_t>(q), scale, root);
                    CHECK(std::fabs(m / root / scale / square_of_code<127>(q) - 1.0f) < 0x1p-21f);
                }
            }
        }
    }
}

TEST(moments_in_8_bits, roots_are_between_those_of_code_1_and_the_largest) {
    for (const float v : {0.0f, 0x1p-149f, 1e-30f}) CHECK_EQ(root_share(v, 2.0f), square_of_code<255>(1));
    CHECK_EQ(root_share(0.125f, 2.0f), 0.5f);
    for (const float v : {1.0f, kInfinity}) CHECK_EQ(root_share(v, 2.0f), 1.0f);
    const float large = std::numeric_limits<float>::max();
    CHECK(root_share(large, 1.0f / large) >= 1.0f - 0x1p-22f);  // the inverse is subnormal
}

}  // namespace
}  // namespace zenflow
