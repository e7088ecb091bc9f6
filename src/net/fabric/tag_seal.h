// How a tag travels where anybody may send one: libfabric's TCP takes a put of no bytes from
// whoever reaches its port, without a key, and reports its data as it reports those of peers.
//
//   bits of the data   hold
//   63 to 32           a check of the tag by a key of the receiver, if a provider carries 64
//   31 to 0            the tag, each bit turned over or not by a mask of the receiver
//
// Key and mask are random, and travel with the receiver's address over the control connections,
// which strangers cannot read or answer. docs/internals/net.md says what a guess is worth.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/hash.h"

namespace xd::net {

struct TagSeal {
  std::uint64_t key = 0;
  std::uint32_t mask = 0;
  std::uint32_t has_check = 0;  // 0 or 1

  std::uint64_t close(std::uint32_t tag) const {
    return check_of(tag) << 32 | static_cast<std::uint32_t>(tag ^ mask);
  }
  // Nothing if no peer can have sent these data.
  std::optional<std::uint32_t> open(std::uint64_t data) const {
    const std::uint32_t tag = static_cast<std::uint32_t>(data) ^ mask;
    if (data >> 32 != check_of(tag)) return std::nullopt;
    return tag;
  }

 private:
  std::uint64_t check_of(std::uint32_t tag) const {
    return has_check != 0 ? hash_combine(key, tag) >> 32 : 0;
  }
};
static_assert(sizeof(TagSeal) == 16, "it travels as it is");

}  // namespace xd::net
