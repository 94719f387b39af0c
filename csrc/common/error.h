// Errors whose text reaches the user: the worker sends it to the trainer, which raises it.
#pragma once

#include <sstream>
#include <stdexcept>

namespace zenflow {

class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Throws an Error whose text is the concatenation of `parts`, as `<<` writes them.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(text.str());
}

// Calls `fail` unless the condition holds. The parts are evaluated either way, in no particular order with the condition.
template <typename... Parts>
void require(bool condition, const Parts&... parts) {
    if (!condition) fail(parts...);
}

}  // namespace zenflow

// Refuses what no trainer of this release sends or writes: the text is the function and the condition.
#define ZENFLOW_CHECK(condition) ::zenflow::require(condition, "invalid input: ", __func__, ": ", #condition)
