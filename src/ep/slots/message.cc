#include "ep/slots/message.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace xd::ep {

std::size_t longest_ll_message(const LlConfig& config) {
  const LlRemoteRows rows{.topk = config.max_topk, .row_bytes = config.max_row_bytes};
  const LlRemoteSums sums{.row_bytes = config.max_wire_bytes()};
  const std::size_t each =
      std::max({rows.item_bytes(), sums.item_bytes(), at(config.max_topk) * sizeof(float)});
  return sizeof(LlRemoteHeader) + at(config.max_tokens) * each;
}

LlRemoteMessage LlRemoteMessage::read(std::span<const std::byte> chunk, int from) {
  LlRemoteMessage message{};
  LlRemoteHeader& header = message.header;
  if (chunk.size() >= sizeof(header)) std::memcpy(&header, chunk.data(), sizeof(header));
  const bool known = header.kind >= LlRemoteKind::dispatch && header.kind <= LlRemoteKind::sums;
  if (!known || header.source != from) {
    throw Error(XD_ERROR_INTERNAL,
                error_text("rank ", from, " has sent a message of ", chunk.size(),
                           " bytes that cannot be: kind ", static_cast<unsigned>(header.kind),
                           " of rank ", header.source),
                from);
  }
  message.body = chunk.subspan(sizeof(header));
  return message;
}

void LlRemoteMessage::require_items(std::uint64_t most, std::size_t bytes_each) const {
  if (header.items > most) refuse("it has more items than tokens");
  if (body.size() != header.items * bytes_each) refuse("its items have other sizes here");
}

void LlRemoteMessage::refuse(const char* why) const {
  throw Error(XD_ERROR_INTERNAL,
              error_text("rank ", header.source, " has sent a message that cannot be: ", why,
                         " (kind ", static_cast<unsigned>(header.kind), ", ", header.items,
                         " items in ", body.size(), " bytes, epoch ", header.epoch, ")"),
              header.source);
}

}  // namespace xd::ep
