// device_kernels.h against plain loops, on every instruction set. Arrays have exactly the sizes that are promised, so that a
// sanitizer sees whoever goes beyond.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "device_kernels.h"
#include "device_kernels_isa.h"
#include "half.h"

namespace zenflow {
namespace {

struct Shape {
    int64_t rows, columns;
};
constexpr Shape kShapes[] = {{1, 1}, {1, 15}, {3, 16}, {5, 17}, {2, 512}, {3, 1031}, {40, 67}};
constexpr int64_t kNoiseMask = 63;
constexpr float kSize = 0.3f;

template <typename T>
constexpr DataType kTypeOf = DataType::kFloat32;
template <>
constexpr DataType kTypeOf<BFloat16> = DataType::kBFloat16;
template <>
constexpr DataType kTypeOf<Float16> = DataType::kFloat16;

template <typename T>
std::vector<T> random_values(int64_t n, unsigned seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    std::vector<T> values;
    for (int64_t i = 0; i < n; ++i) values.push_back(from_float<T>(normal(engine)));
    return values;
}

std::vector<float> random_factors(int64_t n, unsigned seed) {
    std::vector<float> values = random_values<float>(n, seed);
    for (float& value : values) value = std::fabs(value) * 0.01f;
    return values;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

std::vector<InstructionSet> instruction_sets() {
    std::vector<InstructionSet> result;
    for (const InstructionSet candidate : kInstructionSets) {
        if (available(candidate)) result.push_back(candidate);
    }
    return result;
}

// The copy and the selected columns, beside the same sums; targets begin anywhere in a cache line, and nothing is written around
// them.
template <typename T>
void check_copies(const DeviceKernels& kernels, const std::vector<T>& gradient, Shape shape, const std::vector<float>& rows) {
    const std::vector<int64_t> indices = {0, shape.columns / 2, shape.columns - 1};
    for (size_t shift = 0; shift < 3; ++shift) {
        const std::vector<T> untouched = random_values<T>(shape.rows * shape.columns + 8, 5);
        std::vector<T> copy = untouched;
        std::vector<T> selected(rows.size() * indices.size());
        std::vector<float> same_rows(rows.size());
        kernels.take(gradient.data(), shape.rows, shape.columns, same_rows.data(), nullptr, copy.data() + shift, indices.data(),
                     3, selected.data());
        CHECK(same_bits(rows, same_rows));
        std::vector<T> expected = untouched;
        std::copy(gradient.begin(), gradient.end(), expected.begin() + static_cast<std::ptrdiff_t>(shift));
        CHECK(same_bits(copy, expected));
        for (size_t i = 0; i < selected.size(); ++i) {
            const size_t element = i / 3 * static_cast<size_t>(shape.columns) + static_cast<size_t>(indices[i % 3]);
            CHECK(std::memcmp(&selected[i], &gradient[element], sizeof(T)) == 0);
        }
    }
}

template <typename T>
void check_statistics(Shape shape) {
    const std::vector<T> gradient = random_values<T>(shape.rows * shape.columns, 1);
    std::vector<float> first_rows, first_columns;
    for (const InstructionSet set : instruction_sets()) {
        std::vector<float> rows(static_cast<size_t>(shape.rows), -1.0f), columns(static_cast<size_t>(shape.columns), 1.0f);
        const DeviceKernels kernels = device_kernels(kTypeOf<T>, set);
        kernels.take(gradient.data(), shape.rows, shape.columns, rows.data(), columns.data(), nullptr, nullptr, 0, nullptr);
        std::vector<float> rows_only(rows.size());
        kernels.take(gradient.data(), shape.rows, shape.columns, rows_only.data(), nullptr, nullptr, nullptr, 0, nullptr);
        CHECK(same_bits(rows, rows_only));
        check_copies<T>(kernels, gradient, shape, rows);
        if (first_rows.empty()) {
            first_rows = rows;
            first_columns = columns;
        }
        CHECK(same_bits(rows, first_rows));
        CHECK(same_bits(columns, first_columns));
        std::vector<double> expected_rows(rows.size()), expected_columns(columns.size(), 1.0);
        for (size_t i = 0; i < gradient.size(); ++i) {
            const double g = static_cast<double>(to_float(gradient[i]));
            expected_rows[i / columns.size()] += g * g;
            expected_columns[i % columns.size()] += g * g;
        }
        for (size_t i = 0; i < rows.size(); ++i) {
            CHECK(std::fabs(static_cast<double>(rows[i]) - expected_rows[i]) <= 2e-6 * expected_rows[i]);
        }
        for (size_t i = 0; i < columns.size(); ++i) {
            CHECK(std::fabs(static_cast<double>(columns[i]) - expected_columns[i]) <= 1e-5 * expected_columns[i]);
        }
    }
}

TEST(device_kernels, statistics) {
    for (const Shape shape : kShapes) {
        check_statistics<float>(shape);
        check_statistics<BFloat16>(shape);
        check_statistics<Float16>(shape);
    }
}

TEST(device_kernels, statistics_of_what_is_not_finite) {
    for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        std::vector<float> gradient(2 * 33, 1.0f);
        gradient[33 + 32] = value;
        float rows[2];
        zenflow_take(gradient.data(), static_cast<uint32_t>(DataType::kFloat32), 2, 33, rows, nullptr, nullptr, nullptr, 0,
                     nullptr);
        CHECK(rows[0] == 33.0f);
        CHECK(!std::isfinite(rows[1]));
    }
}

// The bits of bfloat16 after stochastic rounding; for the other types nearest even.
BFloat16 rounded(BFloat16, float value, int32_t noise) {
    return {static_cast<uint16_t>((float_bits(value) + static_cast<uint32_t>(noise)) >> 16)};
}
Float16 rounded(Float16, float value, int32_t) { return from_float<Float16>(value); }
float rounded(float, float value, int32_t) { return value; }

template <typename T>
void check_stand_in(Shape shape) {
    const int64_t n = shape.rows * shape.columns;
    const std::vector<T> gradient = random_values<T>(n, 1);
    const std::vector<float> of_rows = random_factors(shape.rows, 2), of_columns = random_factors(shape.columns, 3);
    std::vector<int32_t> noise;
    std::mt19937 engine(4);
    for (int64_t i = 0; i <= kNoiseMask; ++i) noise.push_back(static_cast<int32_t>(engine() & 0xffffu));
    for (const int64_t first : {int64_t{0}, int64_t{37}}) {
        std::vector<T> expected = random_values<T>(n, 5);
        for (int64_t i = 0; i < n; ++i) {
            const auto at = static_cast<size_t>(i);
            const float of_row = of_rows[static_cast<size_t>(i / shape.columns)] * kSize;
            const float scaled = to_float(gradient[at]) * of_row;
            const float update = scaled * of_columns[static_cast<size_t>(i % shape.columns)];
            expected[at] = rounded(T{}, to_float(expected[at]) - update, noise[static_cast<size_t>((first + i) & kNoiseMask)]);
        }
        for (const InstructionSet set : instruction_sets()) {
            std::vector<T> weights = random_values<T>(n, 5);
            device_kernels(kTypeOf<T>, set)
                .stand_in(weights.data(), gradient.data(), shape.rows, shape.columns, of_rows.data(), kSize, of_columns.data(),
                          noise.data(), kNoiseMask, first);
            CHECK(same_bits(weights, expected));
        }
    }
}

TEST(device_kernels, stand_in) {
    for (const Shape shape : kShapes) {
        check_stand_in<float>(shape);
        check_stand_in<BFloat16>(shape);
        check_stand_in<Float16>(shape);
    }
}

// The running means and factors that belong to sums of squares, in double and by the formulas of provisional.py.
struct FactoredStep {
    std::vector<double> row, column;
    double steps = 0.0;

    // 1 / sqrt(v) of an entry, times learning rate and scale.
    double factor(size_t i, size_t j, double beta2, double size) const {
        double mean = 0.0;
        for (const double value : column) mean += value / static_cast<double>(column.size());
        return size * std::sqrt(mean * (1.0 - std::pow(beta2, steps)) / (row[i] * column[j]));
    }
};

void check_factored_step(Shape shape) {
    const double beta2 = 0.95, lr = 0.1;
    const float scale = 0.5f;
    const auto n_rows = static_cast<size_t>(shape.rows), n_columns = static_cast<size_t>(shape.columns);
    std::vector<float> first_of_rows, first_of_columns;
    for (const InstructionSet set : instruction_sets()) {
        std::vector<float> row(n_rows), column(n_columns), of_rows(n_rows), of_columns(n_columns);
        float steps = 0.0f;
        FactoredStep expected{std::vector<double>(n_rows), std::vector<double>(n_columns)};
        const auto step = [&](const std::vector<float>& row_energy, const std::vector<float>& column_energy) {
            return device_kernels(DataType::kFloat32, set)
                .factored_step(row_energy.data(), shape.rows, column_energy.data(), shape.columns, scale, beta2, lr, row.data(),
                               column.data(), &steps, of_rows.data(), of_columns.data());
        };
        for (unsigned seed = 1; seed <= 3; ++seed) {
            const std::vector<float> row_energy = random_factors(shape.rows, seed);
            const std::vector<float> column_energy = random_factors(shape.columns, 10 + seed);
            CHECK(step(row_energy, column_energy));
            expected.steps += 1.0;
            for (size_t i = 0; i < n_rows; ++i) {
                const double mean = 0.25 * static_cast<double>(row_energy[i]) / static_cast<double>(n_columns);
                expected.row[i] = beta2 * expected.row[i] + (1.0 - beta2) * mean;
            }
            for (size_t j = 0; j < n_columns; ++j) {
                const double mean = 0.25 * static_cast<double>(column_energy[j]) / static_cast<double>(n_rows);
                expected.column[j] = beta2 * expected.column[j] + (1.0 - beta2) * mean;
            }
        }
        CHECK(steps == 3.0f);
        for (size_t i = 0; i < n_rows; ++i) {
            for (size_t j = 0; j < n_columns; ++j) {
                const double factor = expected.factor(i, j, beta2, lr * static_cast<double>(scale));
                CHECK(std::fabs(static_cast<double>(of_rows[i] * of_columns[j]) - factor) <= 5e-6 * factor);
            }
        }
        if (first_of_rows.empty()) {
            first_of_rows = of_rows;
            first_of_columns = of_columns;
        }
        CHECK(same_bits(of_rows, first_of_rows));
        CHECK(same_bits(of_columns, first_of_columns));
        const std::vector<float> row_before = row, column_before = column;
        std::vector<float> bad = random_factors(shape.columns, 7);
        bad.back() = std::numeric_limits<float>::infinity();
        CHECK(!step(random_factors(shape.rows, 8), bad));
        CHECK(same_bits(row, row_before) && same_bits(column, column_before) && steps == 3.0f);
        CHECK(same_bits(of_rows, first_of_rows) && same_bits(of_columns, first_of_columns));
    }
}

TEST(device_kernels, factored_step) {
    for (const Shape shape : kShapes) check_factored_step(shape);
}

template <typename T>
void check_columns(int64_t rows, int64_t width, const std::vector<int64_t>& indices) {
    const std::vector<T> matrix = random_values<T>(rows * width, 1);
    const auto n = static_cast<int64_t>(indices.size());
    std::vector<T> selected(static_cast<size_t>(rows * n)), target(matrix.size(), T{});
    zenflow_gather_columns(matrix.data(), static_cast<uint32_t>(kTypeOf<T>), rows, width, indices.data(), n, selected.data());
    std::vector<T> whole(matrix.size(), T{});
    const zenflow_column_write writes[] = {{target.data(), rows, width, indices.data(), n, selected.data()},
                                           {whole.data(), rows, width, nullptr, width, matrix.data()}};
    // An empty vector has no address, which would mean all columns.
    const bool some = !indices.empty();
    zenflow_scatter_columns(some ? writes : writes + 1, some ? 2 : 1, static_cast<uint32_t>(kTypeOf<T>));
    CHECK(same_bits(whole, matrix));
    std::vector<T> expected(matrix.size(), T{});
    for (int64_t row = 0; row < rows; ++row) {
        for (const int64_t index : indices) {
            const auto at = static_cast<size_t>(row * width + index);
            expected[at] = matrix[at];
        }
    }
    CHECK(same_bits(target, expected));
}

TEST(device_kernels, columns) {
    for (const std::vector<int64_t>& indices : {std::vector<int64_t>{}, {0}, {16}, {0, 3, 16}}) {
        check_columns<float>(5, 17, indices);
        check_columns<BFloat16>(5, 17, indices);
        check_columns<Float16>(5, 17, indices);
    }
}

TEST(device_kernels, adamw_is_the_replay_kernel) {
    const size_t n = 1031;
    Hyperparameters h{};
    h.lr = 1e-2;
    h.beta1 = 0.9;
    h.beta2 = 0.99;
    h.eps = 1e-8;
    h.weight_decay = 0.1;
    h.decoupled = 1;
    const std::vector<BFloat16> gradient = random_values<BFloat16>(n, 1);
    std::vector<float> master = random_values<float>(n, 2), exp_avg(n, 0.1f), exp_avg_sq(n, 0.2f);
    std::vector<float> master2 = master, exp_avg2 = exp_avg, exp_avg_sq2 = exp_avg_sq;
    std::vector<BFloat16> weights(n), weights2(n);
    zenflow_adamw(master.data(), exp_avg.data(), exp_avg_sq.data(), gradient.data(), weights.data(),
                  static_cast<uint32_t>(DataType::kBFloat16), n, &h, 3, 0.5f);
    const StepCoefficients coefficients = step_coefficients(h, 3, 0.5f);
    const void* const gradients = gradient.data();
    const WindowView window{Rule::kReplay, 1, &gradients, &coefficients, 0.0f};
    replay_kernel(DataType::kBFloat16, DataType::kBFloat16, InstructionSet::kBaseline)(
        master2.data(), exp_avg2.data(), exp_avg_sq2.data(), window, n, weights2.data(), nullptr);
    CHECK(same_bits(master, master2));
    CHECK(same_bits(exp_avg, exp_avg2));
    CHECK(same_bits(exp_avg_sq, exp_avg_sq2));
    CHECK(same_bits(weights, weights2));
}

}  // namespace
}  // namespace zenflow
