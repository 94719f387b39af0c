// Rounding of moments to bfloat16 and to 8 bits: unbiased for each second moment, with noise that is uniform and uncorrelated.
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "common/half.h"
#include "replay/moments_in_8_bits.h"
#include "replay/stochastic_rounding.h"

namespace zenflow {
namespace {

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
    for (const uint64_t step : {1, 2, 1000, 1000000}) {
        const uint32_t seed = noise_seed(step);
        check([seed](size_t i) { return noise_of(noise_counter(seed, static_cast<uint32_t>(i))); });
    }
    for (const uint32_t element : {0u, 1u, 4095u, 0xffffffffu}) {
        check([element](size_t i) { return noise_of(noise_counter(noise_seed(i), element)); });
    }
}

TEST(moments_in_8_bits, decoded_values_keep_their_codes) {
    for (const float scale : {0x1p-100f, 3.3e-12f, 0.7f, kLargestFloat}) {
        for (int32_t q = -127; q <= 127; ++q) {
            CHECK_EQ(encode_exp_avg(decode_exp_avg(static_cast<int8_t>(q), scale), 1.0f / scale), q);
        }
        for (int32_t c = 0; c <= 255; ++c) {
            for (const uint32_t noise : {0u, 65535u}) {
                CHECK_EQ(encode_exp_avg_sq(decode_exp_avg_sq(static_cast<uint8_t>(c), scale), 1.0f / scale, noise), c);
            }
        }
        CHECK_EQ(decode_exp_avg(127, scale), scale);
        CHECK_EQ(decode_exp_avg_sq(255, scale), scale);
    }
}

TEST(moments_in_8_bits, second_moments_are_rounded_without_bias) {
    for (const float value : {0.9f, 0.1f, 3e-3f, 1e-5f, 1e-8f}) {
        double sum = 0.0;
        for (uint32_t noise = 0; noise < 65536; ++noise) {
            sum += decode_exp_avg_sq(static_cast<uint8_t>(encode_exp_avg_sq(value, 1.0f, noise)), 1.0f);
        }
        CHECK(std::fabs(sum / 65536 / value - 1.0) < 1e-4);
    }
}

// Beside one large element, others get smaller updates or none, never much larger ones.
TEST(moments_in_8_bits, an_outlier_does_not_enlarge_updates) {
    for (float share = 1.0f; share > 1e-9f; share *= 0.7f) {
        const float m = decode_exp_avg(static_cast<int8_t>(encode_exp_avg(share, 1.0f)), 1.0f);
        for (const uint32_t noise : {0u, 65535u}) {
            const auto code = static_cast<uint8_t>(encode_exp_avg_sq(share * share, 1.0f, noise));
            CHECK(code > 0);
            const float update = m / std::sqrt(decode_exp_avg_sq(code, 1.0f));
            CHECK(update < (share > 1e-3f ? 1.5f : 5.0f));
        }
    }
}

}  // namespace
}  // namespace zenflow
