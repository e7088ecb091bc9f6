// Ranks on other machines in a group of low latency: the messages that go straight to them and
// come from them, over links of the group. Messages are read where they have landed.
//
// Nothing here waits but push() and the destructor, for a bounded time that is no error. All links
// are the thread's that makes a call of the group; what they throw is fatal for the communicator.
// docs/internals/machines.md shows why no wait goes in a circle.
#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "comm/remote/links.h"
#include "ep/slots/cpu/operation.h"
#include "ep/slots/cpu/remote/reset.h"
#include "ep/slots/map.h"
#include "ep/slots/message.h"
#include "turn/host/remote_pipeline.h"
#include "turn/peer_masks.h"

namespace xd::ep::cpu {

class LlRemote;

// The messages of dispatch, or of combine.
class LlRemotePipeline final : public turn::RemotePipeline {
 public:
  // Of an operation: each has one that brings the entry, and combine may have a second one.
  enum class Part { entry, sums };

  LlRemotePipeline(LlRemote& remote, Pipeline& pipeline, LlKind kind);

  // ---- For turns ----

  const std::vector<int>& ranks() const override;
  Progress& progress() override;
  bool has_place(int rank, std::uint64_t epoch) const override;
  void leave(std::uint64_t epoch) override;
  bool has_sent(int rank, std::uint64_t epoch) const override;
  bool holds(int rank, std::uint64_t epoch) const override {
    return find(rank, Part::entry, epoch) != nullptr;
  }
  void tell_outsider(int rank) override;
  bool is_telling(int rank, std::uint64_t epoch) const override;
  bool leaves_out(int rank, std::uint64_t epoch) const override {
    return epoch >= left_out_from_[at(rank)];
  }
  void restart(std::uint64_t epoch) override;

  // ---- The operation that is being sent ----

  // The memory of a message behind its header, for a rank of the operation's company. It is free
  // once the pipeline has begun the operation.
  std::byte* open(int rank, Part part);
  // Sends what open() has given: so many items, in so many bytes.
  void send(int rank, Part part, std::uint64_t items, std::size_t bytes);
  // Tells of an operation that brings nothing.
  void send_record();
  // Calls visit(rank) for each remote rank of the operation's company.
  template <class Visit>
  void for_company(Visit&& visit) const {
    for (const int rank : ranks())
      if (pipeline_.company().has(rank)) visit(rank);
  }

  // ---- The operation that is being received ----

  // Nullptr = it is not here. It stays until the pipeline leaves the operation.
  const LlRemoteMessage* find(int rank, Part part, std::uint64_t epoch) const;
  // Calls check(), which throws where a message cannot be: that is fatal.
  template <class Check>
  void judge(Check&& check);

 private:
  friend class LlRemote;
  static constexpr std::size_t kParts = 2;

  struct Arrived {
    bool here = false;
    net::Links::Chunk chunk{};
    LlRemoteMessage message{};
  };
  // A rank that this one leaves out: from which operation on (0 = it does not), and the frame of
  // the message that tells it.
  static constexpr unsigned kUntold = UINT_MAX;
  struct Outsider {
    std::uint64_t since = 0;
    unsigned frame = kUntold;
  };
  std::size_t parts() const { return kind_ == LlKind::combine ? kParts : 1; }
  LlRemoteKind kind_of(Part part) const;
  unsigned frame_of(Part part, std::uint64_t epoch) const;
  Arrived& arrived(std::size_t part, std::uint64_t epoch, int neighbour) {
    return arrived_[part][turn::stage_of(epoch, stages()) * ranks().size() + at(neighbour)];
  }
  std::uint64_t stages() const;
  void take_in(const net::Links::Chunk& chunk, const LlRemoteMessage& message);
  bool hear(const LlRemoteMessage& message);
  void try_to_tell(int rank);
  void bring_entry(const LlRemoteMessage& message) const;
  void note_left_out(const LlRemoteMessage& message);
  // Everything that arrives from now on is kept until restart().
  void begin_reset();
  // Of all operations that this rank has sent: a rank that is in step sends each of them once.
  bool has_all(int neighbour) const { return entries_[at(neighbour)] >= pipeline_.sent(); }

  LlRemote& remote_;
  Pipeline& pipeline_;
  const LlKind kind_;
  std::array<std::vector<net::Links::Frame>, kParts> open_;  // by neighbour
  std::array<std::vector<Arrived>, kParts> arrived_;         // [stage][neighbour]
  std::vector<std::uint64_t> entries_;                       // entries that have come, by neighbour
  std::vector<std::uint64_t> left_out_from_;  // by rank: the operation from which on it leaves this
                                              // one out
  std::vector<Outsider> outsiders_;           // by rank
  std::uint64_t base_ = 0;  // entries up to this operation do not count: it has been reset to that
  bool resetting_ = false;
};

class LlRemote final : public Progress {
 public:
  struct Turns {
    Pipeline& dispatches;
    Pipeline& combines;
    turn::PeerMasks& masks;
    turn::HostReset& reset;
  };
  // Collective.
  LlRemote(const LlGroup& group, const Turns& turns);
  ~LlRemote();
  LlRemote(const LlRemote&) = delete;
  LlRemote& operator=(const LlRemote&) = delete;

  bool poll() override;
  bool is_busy() override;

  LlRemotePipeline& pipeline(LlKind kind) { return pipelines_[static_cast<std::size_t>(kind)]; }
  void begin_call(const HostWait& site) { site_ = site; }
  // Hands the engine what it has not taken yet; gives up after a moment.
  void push();
  // From now on messages of operations behind the reset may come, until the pipelines restart.
  void begin_reset();

 private:
  friend class LlRemotePipeline;

  template <class Body>
  void with_links(Body&& body);
  int neighbour_of(int rank) const { return neighbour_of_[at(rank)]; }
  void take_in_all();
  void tell_outsiders();
  void notice_losses();
  template <class Of>
  bool for_any(Of&& of_neighbour) const;
  template <class Of>
  bool for_all(Of&& of_neighbour) const;
  bool is_outside(int neighbour) const;
  bool holds_back() const;
  bool has_ended(int neighbour) const;
  template <class Done>
  void linger(int longest_ms, Done&& done) noexcept;

  const LlGroup& group_;
  Comm& comm_;
  turn::PeerMasks& masks_;
  const std::vector<int> ranks_;  // the neighbours
  RemoteLinks links_;
  std::vector<int> neighbour_of_;              // by rank
  std::optional<HostWait> site_;               // of the call that this rank is in
  std::array<LlRemotePipeline, 2> pipelines_;  // by LlKind
  LlRemoteReset reset_;
};

template <class Body>
void LlRemote::with_links(Body&& body) {
  RemoteLinks::use(
      comm_, [this] { return *site_; }, std::forward<Body>(body));
}

template <class Check>
void LlRemotePipeline::judge(Check&& check) {
  remote_.with_links(std::forward<Check>(check));
}

}  // namespace xd::ep::cpu
