// device_kernels.h on every instruction set: the same bits as in the baseline, which tests/unit/kernels compares with torch.
// Arrays have exactly the documented sizes, so that sanitizers detect accesses beyond them.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "common/half.h"
#include "cpu_device/device_kernels.h"

namespace zenflow {
namespace {

struct Shape {
    int64_t rows, columns;
};
constexpr Shape kShapes[] = {{1, 1}, {1, 15}, {3, 16}, {5, 17}, {2, 512}, {3, 1031}, {40, 67}};

// The available ones.
std::vector<InstructionSet> instruction_sets() {
    std::vector<InstructionSet> result;
    for (const InstructionSet set : kInstructionSets) {
        if (available(set)) result.push_back(set);
    }
    return result;
}

template <typename T>
std::vector<T> random_values(int64_t n, unsigned seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    std::vector<T> values;
    for (int64_t i = 0; i < n; ++i) values.push_back(from_float<T>(normal(engine)));
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

// The copies begin anywhere in a cache line and have untouched surroundings.
template <typename T>
void check_route(DataType type, T, Shape shape) {
    const std::vector<T> gradient = random_values<T>(shape.rows * shape.columns, 1);
    std::vector<float> of_baseline;
    for (const InstructionSet set : instruction_sets()) {
        for (size_t shift = 0; shift < 3; ++shift) {
            const std::vector<T> untouched = random_values<T>(shape.rows * shape.columns + 8, 5);
            std::vector<T> slot = untouched, expected = untouched;
            std::copy(gradient.begin(), gradient.end(), expected.begin() + static_cast<std::ptrdiff_t>(shift));
            std::vector<float> norms(static_cast<size_t>(shape.rows), -1.0f);
            route_kernel(type, set)(gradient.data(), {0, shape.rows}, shape.columns, norms.data(), slot.data() + shift);
            if (of_baseline.empty()) of_baseline = norms;
            CHECK(same_bits(norms, of_baseline));
            CHECK(same_bits(slot, expected));
        }
    }
}

TEST(device_kernels, route) {
    for_each_type_and_shape([](DataType type, auto zero, Shape shape) { check_route(type, zero, shape); });
}

}  // namespace
}  // namespace zenflow
