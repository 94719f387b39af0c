// What the worker process gives up at its start, since it needs the arena and its socket only.
#pragma once

#include <initializer_list>

namespace zenflow {

// No new privileges for this process and its children, and no program that it would start inherits the given descriptors.
void give_up_privileges(std::initializer_list<int> descriptors);

// Refuses new sockets and other programs from now on with EPERM, to this thread and those that it starts (seccomp). Returns false
// where the kernel cannot: before 4.17, without seccomp, or under an emulator. Call `give_up_privileges` before.
bool refuse_network_and_programs();

}  // namespace zenflow
