#include "worker/first_touch.h"

#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace zenflow {
namespace {

// Reading allocates a page as well, because the mapping is a shared one of a file.
void touch(const void* first, const void* last) {
    const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto end = reinterpret_cast<uintptr_t>(last);
    for (auto at = reinterpret_cast<uintptr_t>(first); at < end; at = (at / page_bytes + 1) * page_bytes) {
        static_cast<void>(*reinterpret_cast<const volatile std::byte*>(at));
    }
}

}  // namespace

void touch_states(const Arena& arena, const Journal::Share& share) {
    const AnyState first = arena.state(share.begin), last = arena.state(share.end);
    touch(first.master, last.master);
    touch(first.exp_avg, last.exp_avg);
    touch(first.exp_avg_sq, last.exp_avg_sq);
}

}  // namespace zenflow
