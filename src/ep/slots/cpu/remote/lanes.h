// Ranks on other machines in a group of low latency: the messages that go straight to them and
// come from them, over links of the group. Messages are read where they have landed.
//
// Nothing here waits but push() and the destructor, for a bounded time that is no error. All links
// are the thread's that makes a call of the group; what they throw is fatal for the communicator.
// docs/internals/machines.md shows why no wait goes in a circle.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "comm/remote/links.h"
#include "ep/slots/cpu/operation.h"
#include "ep/slots/map.h"
#include "ep/slots/message.h"
#include "turn/host/far_lane.h"

namespace xd::ep::cpu {

class LlFar;

// The messages of dispatch, or of combine.
class LlFarLane final : public turn::FarLane {
 public:
  // Of an operation: each has one that brings the entry, and combine may have a second one.
  enum class Part { entry, sums };

  LlFarLane(LlFar& far, Lane& lane, LlKind kind);

  // ---- For turns ----

  const std::vector<int>& ranks() const override;
  Progress& progress() override;
  bool has_place(int rank, std::uint64_t epoch) const override;
  void leave(std::uint64_t epoch) override;
  bool has_sent(int rank, std::uint64_t epoch) const override;

  // ---- The operation that is being sent ----

  // The memory of a message behind its header. It is free once the lane has begun the operation.
  std::byte* open(int rank, Part part);
  // Sends what open() has given: so many items, in so many bytes.
  void send(int rank, Part part, std::uint64_t items, std::size_t bytes);
  // Tells of an operation that brings nothing.
  void send_record();

  // ---- The operation that is being received ----

  // Nullptr = it is not here. It stays until the lane leaves the operation.
  const LlFarMessage* find(int rank, Part part, std::uint64_t epoch) const;
  // Calls check(), which throws where a message cannot be: that is fatal.
  template <class Check>
  void judge(Check&& check);

 private:
  friend class LlFar;
  static constexpr std::size_t kParts = 2;

  struct Arrived {
    bool here = false;
    net::Links::Chunk chunk{};
    LlFarMessage message{};
  };
  std::size_t parts() const { return kind_ == LlKind::combine ? kParts : 1; }
  LlFarKind kind_of(Part part) const;
  unsigned slot_of(Part part, std::uint64_t epoch) const;
  Arrived& arrived(std::size_t part, std::uint64_t epoch, int partner) {
    return arrived_[part][turn::slot_of(epoch, slots()) * ranks().size() + at(partner)];
  }
  std::uint64_t slots() const;
  void take_in(const net::Links::Chunk& chunk, const LlFarMessage& message);
  // Of all operations that this rank has sent: every rank sends each of them once.
  bool has_all() const;

  LlFar& far_;
  Lane& lane_;
  const LlKind kind_;
  std::array<std::vector<net::Links::Slot>, kParts> open_;  // by partner
  std::array<std::vector<Arrived>, kParts> arrived_;        // [slot][partner]
  std::vector<std::uint64_t> entries_;                      // that have come, by partner
};

class LlFar final : public Progress {
 public:
  // Collective.
  LlFar(const LlGroup& group, Lane& dispatches, Lane& combines);
  ~LlFar();
  LlFar(const LlFar&) = delete;
  LlFar& operator=(const LlFar&) = delete;

  bool poll() override;
  bool is_busy() override;

  LlFarLane& lane(LlKind kind) { return lanes_[static_cast<std::size_t>(kind)]; }
  void begin_call(const HostWait& site) { site_ = site; }
  // Hands the engine what it has not taken yet; gives up after a moment.
  void push();

 private:
  friend class LlFarLane;

  template <class Body>
  void with_links(Body&& body);
  int partner_of(int rank) const { return partner_of_[at(rank)]; }
  void take_in_all();
  template <class Done>
  void linger(int longest_ms, Done&& done) noexcept;

  const LlGroup& group_;
  Comm& comm_;
  const std::vector<int> ranks_;  // the partners
  FarLinks links_;
  std::vector<int> partner_of_;     // by rank
  std::optional<HostWait> site_;    // of the call that this rank is in
  std::array<LlFarLane, 2> lanes_;  // by LlKind
};

template <class Body>
void LlFar::with_links(Body&& body) {
  FarLinks::use(
      comm_, [this] { return *site_; }, std::forward<Body>(body));
}

template <class Check>
void LlFarLane::judge(Check&& check) {
  far_.with_links(std::forward<Check>(check));
}

}  // namespace xd::ep::cpu
