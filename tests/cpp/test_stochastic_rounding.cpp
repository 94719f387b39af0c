// Rounding to bfloat16: unbiased for each second moment. Its noise, and that of 8 bits: uniform and uncorrelated.
#include <cmath>
#include <limits>
#include <vector>

#include "adamw/stochastic_rounding.h"
#include "check.h"
#include "common/half.h"

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
