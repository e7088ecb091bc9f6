// The watch thread's work: reads all connections, notices goodbyes, aborts and deaths.
#pragma once

#include <crossdock/status.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/math.h"
#include "base/poll_list.h"
#include "base/wire.h"
#include "meet/inbox.h"
#include "meet/link.h"
#include "meet/met_ranks.h"
#include "meet/packet.h"

namespace xd {

// The reports of the watch thread. They are called on that thread, one at a time, and must neither
// block nor call the mesh, except that on_tick() may send_abort() and cancel(), and the events of
// ranks may send_report_to(). The object outlives the mesh.
class MeshEvents {
 public:
  virtual ~MeshEvents() = default;
  virtual void on_lost(const Loss& loss) = 0;  // ranks that are gone without goodbye
  virtual void on_left(int rank) = 0;          // the rank said goodbye
  virtual void on_abort(int rank) = 0;         // the rank called abort
  // A rank has sent these bytes, by Mesh::send_report() or send_report_to().
  virtual void on_report(int rank, std::span<const std::byte> report) = 0;
  // The watch thread cannot go on, and reports nothing from now on. This call must not allocate,
  // and may also send_abort() and cancel().
  virtual void on_end(xd_status status, int error_number) noexcept = 0;
  // on_tick() is called at least every tick_ms(); -1 = never.
  virtual int tick_ms() const { return -1; }
  virtual void on_tick() {}
};

class MeshWatch {
 public:
  // All of these must outlive the object. links[r] is empty for the own rank, and for ranks that
  // are heard through a relay.
  struct Sources {
    const std::vector<MeshLink>& links;
    const MetRanks& ranks;
    int silence_ms;
    MeshInbox& inbox;
    MeshEvents& events;
  };

  explicit MeshWatch(const Sources& sources);

  // Returns when `wake` becomes readable and `leaving` is set. A call of the event without that
  // makes the thread look after links that have not sent all. Throws if the thread cannot go on:
  // there is no memory for a peer's message, or the system refuses to wait or to receive.
  void run(int wake, const std::atomic<bool>& leaving);

  // True if messages that this rank passes on still wait for room. Any thread.
  bool has_posts() const { return waiting_posts_.load(std::memory_order_acquire) > 0; }

 private:
  enum class State { here, failed, left, lost };  // failed: the rank has said so, and may say more

  // How a connection has ended, if it has.
  enum class End { none, closed, silent };

  void wait_and_serve(int wake, const std::atomic<bool>& leaving);
  int list_sources(int wake);  // returns the place of `wake`
  End drain(int rank);
  bool handle(int from, Packet packet);
  bool take(const MeshMessage& message, Packet packet);
  bool may_say(int from, const MeshHeader& header) const;
  void lose(int rank, int silence_ms);
  bool is_here(int rank) const;
  bool is_heard(int rank) const;  // the rank is here, or has failed and not hung up
  bool is_connected(int rank) const { return static_cast<bool>(from_.links[at(rank)]); }

  // ---- Between hosts ----
  void pass_on(int rank, std::span<const std::byte> packet);
  void spread_loss(int rank, int silence_ms);
  void post(int to, std::shared_ptr<const Bytes> packet);
  bool replace_post(int to, const std::shared_ptr<const Bytes>& packet);
  void send_posts(int to);
  void forget_posts(int to);

  Sources from_;
  std::vector<State> states_;
  std::vector<bool> ended_;    // by process
  std::vector<bool> aborted_;  // by rank
  // The members of run() have room for all sources from the start, so that it allocates for
  // messages alone.
  PollList sources_;
  std::vector<int> place_of_rank_, place_of_process_;  // places in sources_
  std::vector<int> lost_;
  Bytes buffer_;
  // By rank, the packets that it has yet to be sent by this thread, in order.
  std::vector<std::deque<std::shared_ptr<const Bytes>>> posts_;
  std::atomic<int> waiting_posts_{0};
  bool short_of_memory_ = false;  // the system's, for a post
  bool stopped_ = false;
};

}  // namespace xd
