// A group's part in operations with ranks on other machines: entries and counts, which come and go
// by themselves, and chunks, which an operation fills and reads when its desk (ep/bulk/desk.h) says
// so.
//
// Nothing here waits but finish(). Chunks of an operation go and come while this rank waits for
// anything in it: docs/internals/machines.md shows why no wait goes in a circle. All links are this
// thread's; what they throw is fatal for the communicator.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/remote/links.h"
#include "comm/remote/network.h"
#include "comm/remote/routes.h"
#include "ep/bulk/chunk.h"
#include "ep/bulk/cpu/remote/items.h"
#include "ep/bulk/group.h"
#include "turn/host/remote_turn.h"

namespace xd::ep::cpu {

class Lockstep;

// A chunk of another rank.
struct RemoteChunk {
  net::Links::Chunk chunk;
  RemoteHeader header;

  std::span<const std::byte> items() const { return chunk.bytes.subspan(sizeof(RemoteHeader)); }
};

// An operation's way to do units of its desk.
class RemoteHands {
 public:
  struct Filled {
    std::uint32_t items = 0;
    std::size_t bytes = 0;
  };
  // `come`: the chunk that a unit reads; null = a unit that fills. `room`: for the items of the
  // chunk that it fills, chunk_room() of them; null = a unit that reads only. Must not wait.
  virtual Filled work(const DeskUnit& unit, const RemoteChunk* come, std::byte* room) = 0;

 protected:
  ~RemoteHands() = default;
};

class RemoteSide final : public turn::RemoteTurn<Record> {
 public:
  // Collective.
  RemoteSide(const Group& group, Lockstep& lockstep)
      : RemoteSide(group, lockstep, network().open_together(group.comm(), Family::kCreate)) {}
  ~RemoteSide();
  RemoteSide(const RemoteSide&) = delete;
  RemoteSide& operator=(const RemoteSide&) = delete;

  const RemoteRoutes& routes() const { return routes_; }
  // The neighbour over which a remote rank is reached.
  int relay_for(int remote_rank) const { return routes_.relay(routes_.machine_of(remote_rank)); }
  std::size_t chunk_room() const { return window_.frame_bytes - sizeof(RemoteHeader); }

  // ---- For turns ----

  const std::vector<int>& ranks() const override { return routes().remote_ranks(); }
  void enter(const Record& record) override;
  // Also: everything that others announce to this rank has come, so that they are at rest, too,
  // without this rank's next operation.
  bool at_rest() const override;
  int late() const override;
  // Does what can be done without a wait, but a bounded number of units.
  bool poll() override;
  bool is_busy() override;

  void send_counts(std::span<const std::uint32_t> counts);

  // ---- For operations ----

  // The next entry says how many chunks of the operation follow, to each relay.
  void announce(std::span<const std::uint32_t> chunks);
  // From now on chunks are the work's. It is called inside poll(), so also in waits. `kind`: of
  // chunks to relays; requests are answered. `chunks`: as announced, or those that were not known.
  void begin(RemoteHands& hands, RemoteKind kind, std::span<const std::uint32_t> chunks);
  // Returns when all chunks have been sent and read.
  void finish();
  void end() noexcept { hands_ = nullptr; }

  // The items of the operation that is being made; its memory stays for the next one.
  RemoteItems& items() { return items_; }
  // A rank's words that this rank's numbering writes for a remote rank which keeps lists.
  std::span<std::uint32_t> list_for(int remote_rank) { return lists_[at(remote_rank)]; }

  // Memory of sums that come from other machines, one row for each.
  std::span<std::byte> sums(std::size_t bytes) {
    if (sums_.size() < bytes) sums_.resize(bytes);
    return sums_;
  }

 private:
  RemoteSide(const Group& group, Lockstep& lockstep, std::unique_ptr<net::Engine> engine);
  template <class Body>
  void with_links(Body&& body);
  net::Links::Frame take_frame(int neighbour, Direction direction, int frame);
  // Sends a frame whose items are written.
  void send(const net::Links::Frame& frame, RemoteKind kind, RemoteHands::Filled filled,
            std::uint32_t chunks);
  void tell_relays(RemoteKind kind, int frame, std::uint32_t items,
                   std::span<const std::byte> bytes);
  bool lacks_counts(int source) const;
  std::uint32_t announced_by(int source) const;
  void take_in(const net::Links::Chunk& chunk);
  void land(const RemoteChunk& chunk);
  bool do_unit();
  // Of the links: frames of the second direction come behind those of the first.
  unsigned place_of(Direction direction, int frame) const {
    return static_cast<unsigned>(static_cast<int>(direction) * window_.frames + frame);
  }
  std::optional<RemoteChunk>& chunk_in(int neighbour, unsigned place) {
    return chunks_[at(neighbour) * kDirections * at(window_.frames) + place];
  }

  const Group& group_;
  Lockstep& lockstep_;
  Comm& comm_;
  const RemoteWindow window_;
  const RemoteRoutes routes_;
  RemoteLinks links_;
  std::vector<std::optional<RemoteChunk>> chunks_;  // by frame; those that are not given back
  std::vector<DeskPartner> partners_;               // neighbours, likewise
  std::optional<Desk> desk_;                        // of the last operation that has begun
  RemoteHands* hands_ = nullptr;
  RemoteKind kind_{};  // of chunks to relays
  // By neighbour: chunks that this rank's next entry announces, and those that sources' entries
  // have announced, by stage.
  std::vector<std::uint32_t> next_chunks_;
  std::vector<std::array<std::uint32_t, turn::kStages>> announced_;
  std::vector<std::uint64_t> counts_seen_;  // epoch, by neighbour
  std::uint64_t finished_epoch_ = 0;        // of the last operation whose chunks have all been read
  std::optional<HostWait> site_;            // of the operation's waits, from begin() on
  RemoteItems items_;
  std::vector<std::vector<std::uint32_t>> lists_;  // by rank
  std::vector<std::byte> sums_;
};

}  // namespace xd::ep::cpu
