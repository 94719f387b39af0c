// device_kernels.h on every instruction set: the same bits as in the baseline, which tests/unit/kernels compares with torch.
// Arrays have exactly the documented sizes, so that sanitizers detect accesses beyond them.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "adamw/tile_journal.h"
#include "check.h"
#include "common/half.h"
#include "cpu_device/device_kernels.h"
#include "reference_adamw.h"

namespace zenflow {
namespace {

struct Shape {
    int64_t rows, columns;
};
constexpr Shape kShapes[] = {{1, 1}, {1, 15}, {3, 16}, {5, 17}, {2, 512}, {3, 1031}, {40, 67}};
constexpr int64_t kNoiseMask = 63;
constexpr float kSize = 0.3f;

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

// Calls `check` with each element type, a value of it, and each shape.
template <typename Check>
void for_each_type_and_shape(const Check& check) {
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
        for (const Shape shape : kShapes) with_type(type, [&](auto zero) { check(type, zero, shape); });
    }
}

// The copy and the selected columns, beside the same norms. Copies begin anywhere in a cache line and have untouched
// surroundings.
template <typename T>
void check_copies(const DeviceKernels& kernels, const std::vector<T>& gradient, Shape shape, const std::vector<float>& rows) {
    const std::vector<int64_t> indices = {0, shape.columns / 2, shape.columns - 1};
    for (size_t shift = 0; shift < 3; ++shift) {
        const std::vector<T> untouched = random_values<T>(shape.rows * shape.columns + 8, 5);
        std::vector<T> slot = untouched, selected(rows.size() * indices.size());
        std::vector<float> same_rows(rows.size());
        const zenflow_route_args args{gradient.data(), shape.rows, shape.columns, same_rows.data(), nullptr, nullptr, 0, 0};
        kernels.route(args, {0, shape.rows, slot.data() + shift, indices.data(), 3, selected.data()}, {0, shape.rows}, nullptr);
        CHECK(same_bits(rows, same_rows));
        std::vector<T> expected = untouched;
        std::copy(gradient.begin(), gradient.end(), expected.begin() + static_cast<std::ptrdiff_t>(shift));
        CHECK(same_bits(slot, expected));
        for (size_t i = 0; i < selected.size(); ++i) {
            const size_t element = i / 3 * static_cast<size_t>(shape.columns) + static_cast<size_t>(indices[i % 3]);
            CHECK(std::memcmp(&selected[i], &gradient[element], sizeof(T)) == 0);
        }
    }
}

template <typename T>
void check_route(DataType type, T, Shape shape) {
    const std::vector<T> gradient = random_values<T>(shape.rows * shape.columns, 1);
    std::vector<float> first_rows, first_columns;
    for (const InstructionSet set : test::instruction_sets()) {
        std::vector<float> rows(static_cast<size_t>(shape.rows), -1.0f), columns(static_cast<size_t>(shape.columns), 1.0f);
        const DeviceKernels kernels = device_kernels(type, set);
        const zenflow_route_args args{gradient.data(), shape.rows, shape.columns, rows.data(), nullptr, nullptr, 0, 0};
        kernels.route(args, {0, shape.rows, nullptr, nullptr, 0, nullptr}, {0, shape.rows}, columns.data());
        check_copies<T>(kernels, gradient, shape, rows);
        if (set == InstructionSet::kBaseline) {
            first_rows = rows;
            first_columns = columns;
        }
        CHECK(same_bits(rows, first_rows));
        CHECK(same_bits(columns, first_columns));
    }
}

TEST(device_kernels, route) {
    for_each_type_and_shape([](DataType type, auto zero, Shape shape) { check_route(type, zero, shape); });
}

template <typename T>
void check_provisional_update(DataType type, T, Shape shape) {
    const int64_t n = shape.rows * shape.columns;
    const std::vector<T> gradient = random_values<T>(n, 1);
    const std::vector<float> row_scale = random_factors(shape.rows, 2), col_scale = random_factors(shape.columns, 3);
    std::vector<int32_t> noise;
    std::mt19937 engine(4);
    for (int64_t i = 0; i <= kNoiseMask; ++i) noise.push_back(static_cast<int32_t>(engine() & 0xffffu));
    std::vector<T> of_baseline;
    for (const InstructionSet set : test::instruction_sets()) {
        std::vector<T> weights = random_values<T>(n, 5);
        device_kernels(type, set).provisional_update({weights.data(), gradient.data(), shape.rows, shape.columns,
                                                      row_scale.data(), col_scale.data(), noise.data(), kNoiseMask, kSize, 0},
                                                     {0, shape.rows});
        if (set == InstructionSet::kBaseline) of_baseline = weights;
        CHECK(same_bits(weights, of_baseline));
    }
}

TEST(device_kernels, provisional_update) {
    for_each_type_and_shape([](DataType type, auto zero, Shape shape) { check_provisional_update(type, zero, shape); });
}

TEST(device_kernels, adamw_is_the_replay_kernel) {
    constexpr size_t n = 1031;
    const Hyperparameters& h = test::kDecoupled;
    const std::vector<BFloat16> gradient = random_values<BFloat16>(n, 1);
    test::State state = test::random_state(n, 2), expected = state;
    std::vector<BFloat16> weights(n), expected_weights(n);
    const AdamState view = state.view();
    const zenflow_adamw_args args{view.master,
                                  view.exp_avg,
                                  view.exp_avg_sq,
                                  gradient.data(),
                                  weights.data(),
                                  n,
                                  &h,
                                  3,
                                  0.5f,
                                  static_cast<uint32_t>(DataType::kBFloat16)};
    zenflow_adamw(&args, 3);
    const StepCoefficients coefficients = step_coefficients(h, 3, 0.5f);
    const void* const gradients = gradient.data();
    JournalEntry journal;
    start_at(journal, 0);
    replay_kernel(DataType::kBFloat16, DataType::kFloat32, InstructionSet::kBaseline)(
        expected.view(), n, {1, &gradients, &coefficients, 0.0f}, expected_weights.data(), journal);
    test::check_same_state("adamw", view, expected);
    CHECK(same_bits(weights, expected_weights));
}

}  // namespace
}  // namespace zenflow
