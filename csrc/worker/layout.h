// The structures of protocol.h as text, for comparison with another language's mirror of them.
#pragma once

#include <ostream>

namespace zenflow {

// Writes a line "name value" for each constant ("kMagic"), structure ("sizeof(UpdateJob)") and field ("UpdateJob.block": its
// offset in bytes).
void print_layout(std::ostream& out);

}  // namespace zenflow
