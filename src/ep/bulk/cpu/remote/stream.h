// The chunks that sources number: how a source makes them, and how their gateway counts them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ep/bulk/cpu/remote/gateway.h"
#include "ep/bulk/cpu/transfer.h"

namespace xd::ep::cpu {

// This rank's chunks of one kind to its gateways.
class FarStream {
 public:
  FarStream(FarSide& side, FarKind kind);

  // Room for an item of `bytes`, a multiple of net::kItemAlignment, that is to reach a machine.
  // Waits for the gateway to give slots back if need be.
  std::byte* add(int machine, std::size_t bytes);
  // Sends what there is to all gateways. Nothing is added afterwards.
  void finish();

 private:
  struct Way {
    std::optional<net::Links::Slot> slot;
    std::size_t used = 0;
    std::uint32_t items = 0, chunks = 0;
  };
  void open(int machine);
  void close(int machine, bool last);

  FarSide& side_;
  const FarKind kind_;
  std::vector<Way> ways_;  // by machine
};

// The chunks of the ranks whose gateway this rank is.
class FarArrivals {
 public:
  explicit FarArrivals(const FarRoutes& routes)
      : came_(routes.partners().size()), expected_(came_.size()) {}

  // A chunk has been read.
  void count(const FarChunk& chunk) {
    const std::size_t p = at(chunk.partner());
    ++came_[p];
    if (chunk.header.chunks != 0) expected_[p] = chunk.header.chunks;
  }
  bool complete(int source) const {
    return expected_[at(source)] != 0 && came_[at(source)] == expected_[at(source)];
  }

 private:
  std::vector<std::uint32_t> came_, expected_;  // by partner
};

// Returns when all chunks of all sources have been read, and serves them meanwhile.
inline void await_sources(FarSide& side, const FarArrivals& arrivals) {
  for (const int source : side.routes().sources())
    side.wait(source, [&] { return arrivals.complete(source); });
}

// The far machines that some of a token's choices go to, ascending.
struct FarPlaces {
  std::array<int, kMaxTopk> list;
  int count = 0;

  // `place_of` gives the place of a far rank: its machine, or its host.
  template <class PlaceOf>
  void find(const Context& context, const std::uint32_t* codes, int topk, PlaceOf&& place_of) {
    count = 0;
    for (int k = 0; k < topk; ++k) {
      RowRef ref{};
      if (!context.group.codec().decode(codes[k], ref)) continue;
      if (context.group.comm().hosts().is_near(ref.rank)) continue;
      const int place = place_of(ref.rank);
      int i = count;
      while (i > 0 && list[at(i - 1)] > place) --i;
      if (i > 0 && list[at(i - 1)] == place) continue;
      std::copy_backward(list.begin() + i, list.begin() + count, list.begin() + count + 1);
      list[at(i)] = place;
      ++count;
    }
  }
};

// An operation's items to other machines, of which each gateway does with every item what `replay`
// does: replay(header, items).
template <class Replay>
class FarRows final : public FarWork {
 public:
  FarRows(FarSide& side, FarKind kind, Replay replay)
      : side_(side),
        replay_(std::move(replay)),
        kind_(kind),
        stream_(side, kind),
        arrivals_(side.routes()) {
    side_.begin(*this);
  }
  ~FarRows() { side_.end(); }
  FarRows(const FarRows&) = delete;
  FarRows& operator=(const FarRows&) = delete;

  std::byte* add(int machine, std::size_t bytes) { return stream_.add(machine, bytes); }
  // Returns when all items that this rank is the gateway of have been replayed.
  void finish() {
    stream_.finish();
    await_sources(side_, arrivals_);
  }

  bool take(FarChunk& chunk) override {
    if (chunk.header.kind != kind_)
      refuse_chunk(chunk.header, chunk.items().size(), "this operation has no such kind");
    replay_(chunk.header, chunk.items());
    arrivals_.count(chunk);
    return true;
  }

 private:
  FarSide& side_;
  Replay replay_;
  const FarKind kind_;
  FarStream stream_;
  FarArrivals arrivals_;
};

}  // namespace xd::ep::cpu
