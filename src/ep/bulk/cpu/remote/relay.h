// A group's part in operations with ranks on other machines: entries and counts, which come and go
// by themselves, and chunks of rows, which an operation sends and takes through ChunkSink.
//
// Nothing here waits but wait(). Chunks of an operation come in while this rank waits for anything
// in it, and are taken as far as its ChunkSink can: docs/internals/machines.md shows why no wait
// goes in a circle. All links are this thread's; what they throw is fatal for the communicator.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "comm/remote/links.h"
#include "comm/remote/routes.h"
#include "ep/bulk/chunk.h"
#include "ep/bulk/group.h"
#include "turn/host/remote_turn.h"

namespace xd::ep::cpu {

class Lockstep;

// A chunk of another rank. `done` belongs to the work that takes it.
struct RemoteChunk {
  net::Links::Chunk chunk;
  RemoteHeader header;
  std::uint32_t done = 0;  // items

  int neighbour() const { return chunk.neighbour; }
  std::span<const std::byte> items() const { return chunk.bytes.subspan(sizeof(RemoteHeader)); }
};

// An operation's way to deal with chunks.
class ChunkSink {
 public:
  // Takes what it can of a chunk; must not wait. True = all of it, and it has been read: its frame
  // goes back.
  virtual bool take(RemoteChunk& chunk) = 0;

 protected:
  ~ChunkSink() = default;
};

class RemoteSide final : public turn::RemoteTurn<Record> {
 public:
  // Collective.
  RemoteSide(const Group& group, Lockstep& lockstep);
  ~RemoteSide();
  RemoteSide(const RemoteSide&) = delete;
  RemoteSide& operator=(const RemoteSide&) = delete;

  const RemoteRoutes& routes() const { return routes_; }
  std::size_t chunk_room() const { return frame_bytes_ - sizeof(RemoteHeader); }

  // ---- For turns ----

  const std::vector<int>& ranks() const override { return routes().remote_ranks(); }
  void enter(const Record& record) override;
  // Also: everything that others announce to this rank has come, so that they are at rest, too,
  // without this rank's next operation.
  bool at_rest() const override;
  int late() const override;
  bool poll() override;
  bool is_busy() override;

  void send_counts(std::span<const std::uint32_t> counts);

  // ---- For operations ----

  // From now on chunks are the work's. It is called inside poll(), so also in waits.
  void begin(ChunkSink& work);
  void end() noexcept { work_ = nullptr; }

  // Two directions, so that answers never wait for requests.
  enum class Direction { to_relay, to_source };
  std::optional<net::Links::Frame> take_frame(int neighbour, Direction direction);
  // Sends a frame whose items are written. `used`: bytes of them.
  void send(const net::Links::Frame& frame, RemoteKind kind, std::uint32_t items,
            std::uint32_t chunks, std::size_t used);
  static std::byte* items_of(const net::Links::Frame& frame) {
    return frame.bytes.data() + sizeof(RemoteHeader);
  }

  // Returns when ready() holds, which waits for chunks or frames of a neighbour.
  template <class Ready>
  void wait(int neighbour, Ready&& ready) {
    comm_.wait_for(routes().neighbours()[at(neighbour)], *site_, ready,
                   [&] { return site_->epoch - 1; });
  }

  // A rank's words that this rank's numbering writes for a remote rank which keeps lists.
  std::span<std::uint32_t> list_for(int remote_rank) { return lists_[at(remote_rank)]; }

  // Memory of sums that come from other machines, one row for each.
  std::span<std::byte> sums(std::size_t bytes) {
    if (sums_.size() < bytes) sums_.resize(bytes);
    return sums_;
  }

 private:
  template <class Body>
  void with_links(Body&& body);
  void announce(RemoteKind kind, std::uint32_t items, std::span<const std::byte> bytes);
  bool lacks_counts(int source) const;
  void take_in(const net::Links::Chunk& chunk);
  void serve();

  const Group& group_;
  Lockstep& lockstep_;
  Comm& comm_;
  const std::size_t frame_bytes_;
  const RemoteRoutes routes_;
  RemoteLinks links_;
  std::vector<RemoteChunk> chunks_;  // chunks that have come and are not given back
  ChunkSink* work_ = nullptr;
  std::vector<std::uint64_t> counts_seen_;         // epoch, by neighbour
  std::optional<HostWait> site_;                   // of the operation's waits, from begin() on
  std::vector<std::vector<std::uint32_t>> lists_;  // by rank
  std::vector<std::byte> sums_;
};

}  // namespace xd::ep::cpu
