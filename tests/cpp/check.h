// A minimal test framework without dependencies.
//
//     TEST(kill, at_any_instant) { CHECK_EQ(result, expected); }
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace zenflow::test {

struct Test {
    const char* group;
    const char* name;
    void (*body)();
};

inline std::vector<Test>& all_tests() {
    static std::vector<Test> tests;
    return tests;
}

struct Registration {
    Registration(const char* group, const char* name, void (*body)()) { all_tests().push_back({group, name, body}); }
};

// Ends the current test.
class CheckFailed : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void check_failed(const char* file, int line, const Parts&... parts) {
    std::ostringstream text;
    text << file << ':' << line << ": ";
    (text << ... << parts);
    throw CheckFailed(text.str());
}

}  // namespace zenflow::test

#define TEST(group, name)                                                                                \
    static void group##_##name();                                                                        \
    static const ::zenflow::test::Registration register_##group##_##name(#group, #name, group##_##name); \
    static void group##_##name()

#define CHECK(condition)                                                                             \
    do {                                                                                             \
        if (!(condition)) ::zenflow::test::check_failed(__FILE__, __LINE__, #condition " is false"); \
    } while (false)

#define CHECK_EQ(actual, expected)                                                                                     \
    do {                                                                                                               \
        const auto& actual_value = (actual);                                                                           \
        const auto& expected_value = (expected);                                                                       \
        if (!(actual_value == expected_value)) {                                                                       \
            ::zenflow::test::check_failed(__FILE__, __LINE__, #actual " is ", actual_value, ", not ", expected_value); \
        }                                                                                                              \
    } while (false)
