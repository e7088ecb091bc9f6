// A number that names this process and can be sent to others.
#pragma once

#include <sys/random.h>

#include <cerrno>
#include <cstdint>

#include "base/error.h"

namespace xd {

// The number is random, and the same for as long as the process lives.
inline std::uint64_t process_token() {
  static const std::uint64_t token = [] {
    std::uint64_t word = 0;
    if (::getrandom(&word, sizeof(word), 0) != static_cast<ssize_t>(sizeof(word))) {
      fail_errno("getrandom", errno);
    }
    return word;
  }();
  return token;
}

}  // namespace xd
