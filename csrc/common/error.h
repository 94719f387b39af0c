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

// Calls `fail` unless the condition holds; the text reads "x must be ..., got ...". The parts are evaluated either way, in no
// particular order with the condition.
template <typename... Parts>
void require(bool condition, const Parts&... parts) {
    if (!condition) fail(parts...);
}

}  // namespace zenflow
