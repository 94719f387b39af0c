// The contract of protocol.h in a form that another language's mirror of it can be compared with.
#pragma once

#include <ostream>

namespace zenflow {

// Writes a line "name value" for each constant ("kMagic"), structure ("sizeof(Round)") and field ("Round.block": its offset in
// bytes).
void print_layout(std::ostream& out);

}  // namespace zenflow
