#include "ep/slots/message.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace xd::ep {

std::size_t longest_ll_message(const LlConfig& config) {
  const LlFarRows rows{.topk = config.max_topk, .row_bytes = config.max_row_bytes};
  const LlFarSums sums{.row_bytes = config.max_row_bytes};
  const std::size_t each =
      std::max({rows.item_bytes(), sums.item_bytes(), at(config.max_topk) * sizeof(float)});
  return sizeof(LlFarHeader) + at(config.max_tokens) * each;
}

LlFarMessage LlFarMessage::read(std::span<const std::byte> chunk, int from) {
  LlFarMessage message{};
  LlFarHeader& header = message.header;
  if (chunk.size() >= sizeof(header)) std::memcpy(&header, chunk.data(), sizeof(header));
  const bool known = header.kind >= LlFarKind::dispatch && header.kind <= LlFarKind::sums;
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

void LlFarMessage::require_items(std::uint64_t most, std::size_t bytes_each) const {
  if (header.items > most) refuse("it has more items than tokens");
  if (body.size() != header.items * bytes_each) refuse("its items have other sizes here");
}

void LlFarMessage::refuse(const char* why) const {
  throw Error(XD_ERROR_INTERNAL,
              error_text("rank ", header.source, " has sent a message that cannot be: ", why,
                         " (kind ", static_cast<unsigned>(header.kind), ", ", header.items,
                         " items in ", body.size(), " bytes, epoch ", header.epoch, ")"),
              header.source);
}

}  // namespace xd::ep
