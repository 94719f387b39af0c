// Failures whose text reaches the user: the worker sends it to the trainer, which raises it.
#pragma once

#include <sstream>
#include <stdexcept>

namespace zenflow {

class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Throws an Error whose text is the parts one after the other, as `<<` writes them.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(text.str());
}

}  // namespace zenflow
