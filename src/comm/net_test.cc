#include "comm/net_test.h"

#include <charconv>
#include <string>
#include <string_view>

#include "base/env.h"
#include "base/error.h"

namespace xd {
namespace {

std::uint64_t number_in(std::string_view word, std::string_view name) {
  std::uint64_t number = 0;
  const char* const end = word.data() + word.size();
  const auto read = std::from_chars(word.data() + name.size(), end, number);
  XD_REQUIRE(read.ec == std::errc() && read.ptr == end, "XD_NET_TEST: '", word,
             "', expected a number behind ", name);
  return number;
}

NetTest read() {
  NetTest test;
  std::string_view rest = env().net_test;
  while (!rest.empty()) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view word = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    if (word == "apart") {
      test.apart = true;
    } else if (word.starts_with("chaos=")) {
      test.chaos = number_in(word, "chaos=");
    } else if (word.starts_with("damage=")) {
      test.damaged_in = static_cast<unsigned>(number_in(word, "damage="));
    } else if (word.starts_with("slot=")) {
      test.slot_bytes = number_in(word, "slot=");
    } else if (word.starts_with("put=")) {
      test.longest_put = number_in(word, "put=");
    } else {
      fail(XD_ERROR_INVALID_ARGUMENT, "XD_NET_TEST: '", word,
           "', expected apart, chaos=SEED, damage=PIECES, slot=BYTES or put=BYTES");
    }
  }
  return test;
}

}  // namespace

const NetTest& net_test() {
  static const NetTest test = read();
  return test;
}

}  // namespace xd
