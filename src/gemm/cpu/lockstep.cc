#include "gemm/cpu/lockstep.h"

#include "base/error.h"

namespace xd::gemm::cpu {
namespace {

Segments share(const Context& context, const Map& map) {
  Segments segments = context.comm().share(kCreateContext, map.end);
  for (const NearRank r : context.near()) require_size(segments[at(r)], map.end, r);
  return segments;
}

}  // namespace

ContextMemory::ContextMemory(const Context& context)
    : map_(Map::make(context.config())), shared_(share(context, map_)) {}

Lockstep::Lockstep(const Context& context)
    : ContextMemory(context),
      HostTurn(context.comm(), context.number(), map().turn, shared().areas(), context.subject()),
      comm_(context.comm()) {}

void Lockstep::post(NearRank peer, std::uint64_t area, std::uint64_t word) const {
  area_of(peer, area + at(comm_.rank()) * kWordBytes).signal(word);
  comm_.ring(peer);
}

void Lockstep::tell_all(std::uint64_t area) const {
  for (const NearRank peer : peers()) post(peer, area, epoch());
}

void Lockstep::tell_all_failed(std::uint64_t area) const {
  // Peers of a finished communicator learn of its error by themselves: that is theirs, too, and not
  // that this rank has failed.
  if (comm_.errors().fatal_error() != nullptr) return;
  for (const NearRank peer : peers()) post(peer, area, epoch() | kFailed);
}

void Lockstep::await_all(std::uint64_t area) const {
  const HostWait site = this->site(XD_PHASE_ROWS);
  for (const NearRank peer : peers()) {
    const NearMemory word = area_of(comm_.hosts().self(), area + at(peer) * kWordBytes);
    const auto seen = [&] { return word.seen() & ~kFailed; };
    comm_.wait_for(
        peer, site, [&] { return seen() == epoch(); }, seen);
    if ((word.seen() & kFailed) != 0) {
      fail(XD_ERROR_MISMATCH, "rank ", int{peer},
           " failed in the operation (its own error text says why)");
    }
  }
}

}  // namespace xd::gemm::cpu
