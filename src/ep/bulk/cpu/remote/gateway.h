// A group's part in operations with ranks on other machines: entries and counts, which come and go
// by themselves, and chunks of rows, which an operation sends and takes through FarWork.
//
// Nothing here waits but wait(). Chunks of an operation come in while this rank waits for anything
// in it, and are taken as far as its FarWork can: docs/internals/machines.md shows why no wait goes
// in a circle. All links are this thread's; what they throw is fatal for the communicator.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "comm/remote/links.h"
#include "comm/remote/routes.h"
#include "ep/bulk/chunk.h"
#include "ep/bulk/group.h"
#include "turn/host/far_turn.h"

namespace xd::ep::cpu {

class Lockstep;

// A chunk of another rank. `done` belongs to the work that takes it.
struct FarChunk {
  net::Links::Chunk chunk;
  FarHeader header;
  std::uint32_t done = 0;  // items

  int partner() const { return chunk.partner; }
  std::span<const std::byte> items() const { return chunk.bytes.subspan(sizeof(FarHeader)); }
};

// What an operation does with chunks.
class FarWork {
 public:
  // Takes what it can of a chunk; must not wait. True = all of it, and it has been read: its slot
  // goes back.
  virtual bool take(FarChunk& chunk) = 0;

 protected:
  ~FarWork() = default;
};

class FarSide final : public turn::FarTurn<Record> {
 public:
  // Collective.
  FarSide(const Group& group, Lockstep& lockstep);
  ~FarSide();
  FarSide(const FarSide&) = delete;
  FarSide& operator=(const FarSide&) = delete;

  const FarRoutes& routes() const { return routes_; }
  std::size_t chunk_room() const { return slot_bytes_ - sizeof(FarHeader); }

  // ---- For turns ----

  const std::vector<int>& ranks() const override { return routes().far_ranks(); }
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
  void begin(FarWork& work);
  void end() noexcept { work_ = nullptr; }

  // Two lanes, so that answers never wait for requests.
  enum class Lane { to_gateway, to_source };
  std::optional<net::Links::Slot> take_slot(int partner, Lane lane);
  // Sends a slot whose items are written. `used`: bytes of them.
  void send(const net::Links::Slot& slot, FarKind kind, std::uint32_t items, std::uint32_t chunks,
            std::size_t used);
  static std::byte* items_of(const net::Links::Slot& slot) {
    return slot.bytes.data() + sizeof(FarHeader);
  }

  // Returns when ready() holds, which waits for chunks or slots of a partner.
  template <class Ready>
  void wait(int partner, Ready&& ready) {
    comm_.wait_for(routes().partners()[at(partner)], *site_, ready,
                   [&] { return site_->epoch - 1; });
  }

  // A rank's words that this rank's numbering writes for a far rank which keeps lists.
  std::span<std::uint32_t> list_for(int far_rank) { return lists_[at(far_rank)]; }

  // Memory of sums that come from other machines, one row for each.
  std::span<std::byte> sums(std::size_t bytes) {
    if (sums_.size() < bytes) sums_.resize(bytes);
    return sums_;
  }

 private:
  template <class Body>
  void with_links(Body&& body);
  void announce(FarKind kind, std::uint32_t items, std::span<const std::byte> bytes);
  bool lacks_counts(int source) const;
  void take_in(const net::Links::Chunk& chunk);
  void serve();

  const Group& group_;
  Lockstep& lockstep_;
  Comm& comm_;
  const std::size_t slot_bytes_;
  const FarRoutes routes_;
  FarLinks links_;
  std::vector<FarChunk> chunks_;  // that have come and are not given back
  FarWork* work_ = nullptr;
  std::vector<std::uint64_t> counts_seen_;         // epoch, by partner
  std::optional<HostWait> site_;                   // of the operation's waits, from begin() on
  std::vector<std::vector<std::uint32_t>> lists_;  // by rank
  std::vector<std::byte> sums_;
};

}  // namespace xd::ep::cpu
