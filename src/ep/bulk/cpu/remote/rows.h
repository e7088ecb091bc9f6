// An operation's chunks to other machines, of which each relay does with every chunk what `take`
// does: take(header, items). fill(relay, chunk, room) writes one, and returns what it is.
#pragma once

#include <span>
#include <utility>

#include "ep/bulk/cpu/remote/relay.h"

namespace xd::ep::cpu {

template <class Fill, class Take>
class RemoteRows final : public RemoteHands {
 public:
  RemoteRows(RemoteSide& side, RemoteKind kind, std::span<const std::uint32_t> chunks, Fill fill,
             Take take)
      : side_(side), fill_(std::move(fill)), take_(std::move(take)) {
    side_.begin(*this, kind, chunks);
  }
  ~RemoteRows() { side_.end(); }
  RemoteRows(const RemoteRows&) = delete;
  RemoteRows& operator=(const RemoteRows&) = delete;

  Filled work(const DeskUnit& unit, const RemoteChunk* come, std::byte* room) override {
    if (unit.work == DeskUnit::fill) return fill_(unit.partner, unit.chunk, room);
    take_(come->header, come->items());
    return {};
  }

 private:
  RemoteSide& side_;
  Fill fill_;
  Take take_;
};

}  // namespace xd::ep::cpu
