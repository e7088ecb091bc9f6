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
#include "turn/host/remote_pipeline.h"

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

  // ---- The operation that is being sent ----

  // The memory of a message behind its header. It is free once the pipeline has begun the
  // operation.
  std::byte* open(int rank, Part part);
  // Sends what open() has given: so many items, in so many bytes.
  void send(int rank, Part part, std::uint64_t items, std::size_t bytes);
  // Tells of an operation that brings nothing.
  void send_record();

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
  std::size_t parts() const { return kind_ == LlKind::combine ? kParts : 1; }
  LlRemoteKind kind_of(Part part) const;
  unsigned frame_of(Part part, std::uint64_t epoch) const;
  Arrived& arrived(std::size_t part, std::uint64_t epoch, int neighbour) {
    return arrived_[part][turn::stage_of(epoch, stages()) * ranks().size() + at(neighbour)];
  }
  std::uint64_t stages() const;
  void take_in(const net::Links::Chunk& chunk, const LlRemoteMessage& message);
  // Of all operations that this rank has sent: every rank sends each of them once.
  bool has_all() const;

  LlRemote& remote_;
  Pipeline& pipeline_;
  const LlKind kind_;
  std::array<std::vector<net::Links::Frame>, kParts> open_;  // by neighbour
  std::array<std::vector<Arrived>, kParts> arrived_;         // [stage][neighbour]
  std::vector<std::uint64_t> entries_;                       // entries that have come, by neighbour
};

class LlRemote final : public Progress {
 public:
  // Collective.
  LlRemote(const LlGroup& group, Pipeline& dispatches, Pipeline& combines);
  ~LlRemote();
  LlRemote(const LlRemote&) = delete;
  LlRemote& operator=(const LlRemote&) = delete;

  bool poll() override;
  bool is_busy() override;

  LlRemotePipeline& pipeline(LlKind kind) { return pipelines_[static_cast<std::size_t>(kind)]; }
  void begin_call(const HostWait& site) { site_ = site; }
  // Hands the engine what it has not taken yet; gives up after a moment.
  void push();

 private:
  friend class LlRemotePipeline;

  template <class Body>
  void with_links(Body&& body);
  int neighbour_of(int rank) const { return neighbour_of_[at(rank)]; }
  void take_in_all();
  template <class Done>
  void linger(int longest_ms, Done&& done) noexcept;

  const LlGroup& group_;
  Comm& comm_;
  const std::vector<int> ranks_;  // the neighbours
  RemoteLinks links_;
  std::vector<int> neighbour_of_;              // by rank
  std::optional<HostWait> site_;               // of the call that this rank is in
  std::array<LlRemotePipeline, 2> pipelines_;  // by LlKind
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
