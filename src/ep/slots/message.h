// Messages of a low-latency group to ranks on other machines: one message for each remote
// rank and operation, straight to it, with everything that a near rank finds in shared memory. Each
// is a chunk of the links (net/links.h). docs/internals/machines.md has the protocol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "ep/plan/plan.h"
#include "ep/slots/config.h"
#include "ep/slots/record.h"
#include "net/link_map.h"

namespace xd::ep {

// A message has its sender's record, and behind the header:
enum class LlRemoteKind : std::uint32_t {
  dispatch = 1,  // the items and rows of the sender's tokens that have experts here: LlRemoteRows
  combine = 2,   // sums, as below; or, where the call has weights, those of all tokens: [T][K]
  sums = 3,      // where the call has weights: the sums of this rank's tokens: LlRemoteSums
};
inline constexpr int kLlRemoteKinds = 3;

struct LlRemoteHeader {
  std::uint64_t epoch;  // number of the operation among those of its kind
  LlRemoteKind kind;
  std::int32_t source;  // the rank that has sent it
  std::uint32_t items;
  std::uint32_t item_bytes;  // of CUDA devices: of an item behind its head; 0 on the CPU
  LlRecord record;
};
static_assert(sizeof(LlRemoteHeader) % net::kItemAlignment == 0 &&
              std::has_unique_object_representations_v<LlRemoteHeader>);

// An LlItem with local experts in place of rows, then the row with its scales.
struct LlRemoteRows {
  int topk;
  std::size_t row_bytes;  // with scales

  constexpr std::size_t row_at() const { return ll_item_bytes(topk); }
  constexpr std::size_t item_bytes() const { return row_at() + net::item_size(row_bytes); }
};

// The token's number, 32 bits, then the sum in the form of the call's wire. By ascending token.
struct LlRemoteSums {
  std::size_t row_bytes;

  static constexpr std::size_t row_at() { return net::kItemAlignment; }
  constexpr std::size_t item_bytes() const { return row_at() + net::item_size(row_bytes); }
};

// The longest message of a group.
std::size_t longest_ll_message(const LlConfig& config);

// A message that has come. It may have been damaged by anyone who can write into a rank's room, so
// all of it is looked at before it is used as a number of bytes or as a place.
struct LlRemoteMessage {
  LlRemoteHeader header;
  std::span<const std::byte> body;

  // Throws INTERNAL, naming the sender, unless the message is of this rank.
  static LlRemoteMessage read(std::span<const std::byte> chunk, int from);
  // Throws INTERNAL unless there are at most `most` items, each of so many bytes.
  void require_items(std::uint64_t most, std::size_t bytes_each) const;
  [[noreturn]] void refuse(const char* why) const;

  const std::byte* item(std::uint64_t number, std::size_t bytes_each) const {
    return body.data() + number * bytes_each;
  }
};

}  // namespace xd::ep
