// The chunks that sources number: how a source makes them, and how their relay counts them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ep/bulk/cpu/remote/relay.h"
#include "ep/bulk/cpu/transfer.h"

namespace xd::ep::cpu {

// This rank's chunks of one kind to its relays.
class RemoteStream {
 public:
  RemoteStream(RemoteSide& side, RemoteKind kind);

  // Region for an item of `bytes`, a multiple of net::kItemAlignment, that is to reach a machine.
  // Waits for the relay to give frames back if need be.
  std::byte* add(int machine, std::size_t bytes);
  // Sends what there is to all relays. Nothing is added afterwards.
  void finish();

 private:
  struct Way {
    std::optional<net::Links::Frame> frame;
    std::size_t used = 0;
    std::uint32_t items = 0, chunks = 0;
  };
  void open(int machine);
  void close(int machine, bool last);

  RemoteSide& side_;
  const RemoteKind kind_;
  std::vector<Way> ways_;  // by machine
};

// The chunks of the ranks whose relay this rank is.
class RemoteArrivals {
 public:
  explicit RemoteArrivals(const RemoteRoutes& routes)
      : came_(routes.neighbours().size()), expected_(came_.size()) {}

  // A chunk has been read.
  void count(const RemoteChunk& chunk) {
    const std::size_t p = at(chunk.neighbour());
    ++came_[p];
    if (chunk.header.chunks != 0) expected_[p] = chunk.header.chunks;
  }
  bool complete(int source) const {
    return expected_[at(source)] != 0 && came_[at(source)] == expected_[at(source)];
  }

 private:
  std::vector<std::uint32_t> came_, expected_;  // by neighbour
};

// Returns when all chunks of all sources have been read, and serves them meanwhile.
inline void await_sources(RemoteSide& side, const RemoteArrivals& arrivals) {
  for (const int source : side.routes().sources())
    side.wait(source, [&] { return arrivals.complete(source); });
}

// The remote machines that some of a token's choices go to, ascending.
struct RemotePlaces {
  std::array<int, kMaxTopk> list;
  int count = 0;

  // `place_of` gives the place of a remote rank: its machine, or its host.
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

// An operation's items to other machines, of which each relay does with every item what `replay`
// does: replay(header, items).
template <class Replay>
class RemoteRows final : public ChunkSink {
 public:
  RemoteRows(RemoteSide& side, RemoteKind kind, Replay replay)
      : side_(side),
        replay_(std::move(replay)),
        kind_(kind),
        stream_(side, kind),
        arrivals_(side.routes()) {
    side_.begin(*this);
  }
  ~RemoteRows() { side_.end(); }
  RemoteRows(const RemoteRows&) = delete;
  RemoteRows& operator=(const RemoteRows&) = delete;

  std::byte* add(int machine, std::size_t bytes) { return stream_.add(machine, bytes); }
  // Returns when all items that this rank is the relay of have been replayed.
  void finish() {
    stream_.finish();
    await_sources(side_, arrivals_);
  }

  bool take(RemoteChunk& chunk) override {
    if (chunk.header.kind != kind_)
      refuse_chunk(chunk.header, chunk.items().size(), "this operation has no such kind");
    replay_(chunk.header, chunk.items());
    arrivals_.count(chunk);
    return true;
  }

 private:
  RemoteSide& side_;
  Replay replay_;
  const RemoteKind kind_;
  RemoteStream stream_;
  RemoteArrivals arrivals_;
};

}  // namespace xd::ep::cpu
