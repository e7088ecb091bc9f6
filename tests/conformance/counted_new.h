// Replaces operator new of the program, library included, by one that counts.
#pragma once

#include <cstddef>

namespace xd::test {

std::size_t allocations_of_this_thread();
std::size_t live_bytes();  // bytes that the process has allocated and not freed

}  // namespace xd::test
