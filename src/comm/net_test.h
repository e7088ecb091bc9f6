// Requests of the library's tests to communicators between machines: XD_NET_TEST.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace xd {

struct NetTest {
  bool apart = false;  // declared hosts of one machine share no memory
  // Ranks, which are threads of one process, reach one another through the chaos engine with this
  // seed, over memory.
  std::optional<std::uint64_t> chaos;
  unsigned damaged_in = 0;      // of so many pieces of chunks one arrives with a changed bit
  std::size_t slot_bytes = 0;   // of links; 0 = chosen by the user of the links
  std::size_t longest_put = 0;  // of the chaos engine; 0 = as long as the engine below takes
};

// Read once. Throws INVALID_ARGUMENT.
const NetTest& net_test();

}  // namespace xd
