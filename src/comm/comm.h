// The communicator: one rank's membership in a set of ranks.
//
// It owns the connections to the peers (mesh), the control segments with doorbells and error
// boards, and the symmetric heaps. Executors on the host wait for peers through wait_for() alone,
// which is bounded by the timeout and ends at once on a fatal error; kernels wait by themselves,
// using device_comm().
#pragma once

#include <crossdock/comm.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/math.h"
#include "comm/device_side.h"
#include "comm/fatal.h"
#include "comm/operations.h"
#include "comm/symmetric_heap.h"
#include "memory/host_segment.h"
#include "mesh/mesh.h"

namespace xd {

// The place where an executor waits, for error texts, and its deadline, which is one for all peers
// of a phase.
struct WaitSite {
  xd_phase phase;
  int group;
  int operation;
  std::uint64_t epoch;
  Deadline deadline;
};

// Throws MISMATCH unless a rank's segment is there and has at least `bytes`. A rank that runs
// another version of the library may lay its memory out differently.
void require_size(const std::shared_ptr<Segment>& segment, std::size_t bytes, int rank);

class Comm final : private MeshEvents {
 public:
  // Makes the communicator, as xd_comm_create describes it. `config` has been read with
  // read_struct.
  static std::shared_ptr<Comm> create(const xd_comm_config& config);
  ~Comm() override;

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  DLDevice device() const { return device_; }
  int timeout_ms() const { return timeout_ms_; }
  int local_ranks() const { return local_ranks_; }
  // Ranks of this communicator, of any process, on this rank's device; itself included.
  int ranks_on_device() const;
  // Multiprocessors of this rank's device; 0 on the CPU.
  int multiprocessors() const { return introductions_[at(rank_)].multiprocessors; }
  Deadline deadline() const { return Deadline::after_ms(timeout_ms_); }

  // The work of xd_comm_destroy: says goodbye. Groups may keep the object alive, but its calls fail
  // from now on.
  void close();

  // ---- Collective host calls ----

  static constexpr CollectiveCall kCreate{"xd_comm_create"}, kGrow{"xd_mem_grow"},
      kBarrier{"xd_comm_barrier"}, kRegister{"xd_mem_register"}, kDeregister{"xd_mem_deregister"};

  struct Contribution {
    Bytes blob;
    int fd = -1;
  };
  // Every rank does `work` and gives its contribution to all. If it throws on some rank, that rank
  // rethrows and all others throw MISMATCH naming the lowest such rank and its text; so do ranks
  // that are in different collectives. After agree() has returned, `work` has succeeded everywhere.
  std::vector<Mesh::Item> agree(CollectiveCall what, const std::function<Contribution()>& work);

  // A collective call as a whole: `body` goes through one or more agree(), and nothing can fail
  // after the last. If this rank fails between two of them (mostly for want of memory), the failure
  // is its contribution to the next one, for which the peers wait.
  template <class Body>
  void collectively(CollectiveCall what, Body&& body) {
    peers_know_ = false;
    try {
      std::forward<Body>(body)();
    } catch (...) {
      if (!peers_know_) bring_failure(what);
      throw;
    }
  }

  using Segments = std::vector<std::shared_ptr<Segment>>;  // by rank
  // Allocates `bytes` of shared memory here (0 = none), and maps every rank's; null for a rank that
  // has none. The memory is on the ranks' devices, or on their host.
  Segments share(CollectiveCall what, std::size_t bytes) {
    return share_on(*device_memory_, what, bytes);
  }
  Segments share_host(CollectiveCall what, std::size_t bytes) {
    return share_on(host_memory_, what, bytes);
  }

  void barrier();
  void grow_heap(std::size_t bytes) {
    collectively(kGrow, [&] { add_to_heap(kGrow, bytes); });
  }
  // Makes memory that the caller owns one more segment of symmetric memory; bytes = 0: this rank
  // gives none. Returns the segment's number, the same on all ranks.
  int register_memory(void* ptr, std::size_t bytes);
  void deregister_memory(int registration);
  // Counts the groups: every rank counts each group that it is asked to make, also if that fails.
  void begin_group() { ++groups_; }
  int group_number() const { return groups_ - 1; }
  // Names the operations of a group in error texts. The table stays for good.
  void name_operations(int group, const Operations& operations);

  // ---- Memory ----

  SymmetricHeap& heap() { return heap_; }
  const SymmetricHeap& heap() const { return heap_; }

  // The communicator as kernels of this rank know it. CUDA only.
  const DeviceComm& device_comm() const { return device_side_->device_comm(); }

  // ---- Errors ----

  // Throws if the communicator is finished, closed, or was made by a parent process.
  void check_usable() const;
  // The check for calls that concern this rank alone: they also work when the communicator is
  // finished.
  void check_open() const;
  void check_process() const;

  // Records a fatal error; on each rank the first one wins. Any thread. An error that every rank
  // notices by itself (a lost peer) is recorded here only, until this rank leaves.
  enum class Spread { here, everywhere };
  void raise(const FatalError& error, Spread spread) { raise(error, spread, nullptr); }
  [[noreturn]] void raise_and_throw(const FatalError& error, Spread spread);
  void abort();

  // This rank's account of an error of a group that is fatal by the group's config.
  struct Cause {
    int peer = -1;  // the lowest rank that the error is about
    std::array<char, 256> text{};
  };
  // Raises such an error of this rank.
  void raise_cause(const FatalError& error, const Cause& cause) {
    raise(error, error.met_by_all != 0 ? Spread::here : Spread::everywhere, &cause);
  }
  // A function that is asked for the words of such an error of kernels, when the host takes it over
  // or hears of it from a peer. It may be called on any thread, under a lock, so it must not call
  // the communicator. Empty = there is none any more.
  using Explain = std::function<Cause(const FatalError&)>;
  void explain_by(int group, Explain explain);

  // The fatal error, or nullptr. An error that kernels have met is taken over here.
  const FatalError* fatal_error() const;
  // The error as one sentence.
  std::string text_of(const FatalError& error) const;

  // ---- Waiting for peers (CPU executor) ----

  // Rings the peer's doorbell. Call it after storing flags (release) into that peer's memory.
  void ring(int peer) const { controls_[at(peer)].bell().ring(); }

  // Returns when ready() holds, which looks at flags of `peer` with acquire loads. `seen()` gives
  // the peer's last epoch for the error text. Throws the fatal error that ends the wait.
  template <class Ready, class Seen>
  void wait_for(int peer, const WaitSite& site, Ready&& ready, Seen&& seen) {
    if (ready()) return;
    Doorbell& bell = controls_[at(rank_)].bell();
    const Deadline spin = Deadline(Deadline::Clock::now() + spin_);
    Interruption interruption;
    for (;;) {
      const std::uint32_t rings = bell.value();  // read before the flags: see Doorbell
      if (ready()) return;
      throw_if_failed();
      // The goodbye came after the peer's last flag, so the flags are looked at once more.
      if (left(peer) && !ready()) fail_left(peer, site);
      if (site.deadline.passed()) fail_timeout(peer, site, seen());
      if (spin.passed()) {
        bell.sleep(rings, interruption.next(site.deadline));
        if (interruption.requested()) abort();
      } else {
        relax();
      }
    }
  }

 private:
  Comm(const xd_comm_config& config, Bootstrap& bootstrap);

  void set_up(std::size_t heap_bytes);
  void introduce();
  void make_controls();
  void make_device_side();
  // `use` is called with all segments, in the last step that may fail on some rank.
  Segments share_on(const SegmentMaker& memory, CollectiveCall what, std::size_t bytes,
                    const std::function<void(const Segments&)>& use = {});
  void compare_demands(const SegmentMaker& memory, CollectiveCall what, std::size_t bytes);
  void add_to_heap(CollectiveCall what, std::size_t bytes);
  std::uint32_t agree_on_number(CollectiveCall what);
  int enlist(void* ptr, std::size_t bytes);
  void delist(int registration);
  void fail_delisting();
  void require_device_memory() const;
  void gather(std::span<const std::byte> blob, int fd, std::span<Mesh::Item> items);
  void bring_failure(CollectiveCall what) noexcept;
  // The descriptor that a rank has sent; throws SYSTEM if this process had no room for it.
  static UniqueFd take_descriptor(int rank, Mesh::Item& item);
  void fail_round(const Caught& error, int peer);
  void raise(const FatalError& error, Spread spread, const Cause* cause);
  void record(const FatalError& error) const;
  void learn_cause(const FatalError& error) const;
  const FatalError* reported() const;  // the error on this rank's board
  void tell_peers(const FatalError& error);
  void on_lost(std::span<const int> ranks) override;
  void on_left(int rank) override;
  void on_abort(int rank) override;
  void on_end(xd_status status, int error_number) noexcept override;
  int tick_ms() const override;
  void on_tick() override;

  bool left(int peer) const { return left_[at(peer)].load(std::memory_order_acquire); }
  void throw_if_failed() const;
  FatalError error_at(const WaitSite& site, xd_status status, int peer) const;
  [[noreturn]] void fail_left(int peer, const WaitSite& site);
  [[noreturn]] void fail_timeout(int peer, const WaitSite& site, std::uint64_t seen);
  static void relax();

  const int rank_;
  const int num_ranks_;
  const DLDevice device_;
  const int timeout_ms_;
  const std::string name_;
  const int process_;  // getpid() at creation
  int local_ranks_ = 1;
  std::chrono::nanoseconds spin_{};
  std::atomic<int> groups_{0};
  std::atomic<bool> closed_{false};

  HostSegmentMaker host_memory_;
  std::unique_ptr<SegmentMaker> device_memory_;
  std::vector<DeviceIntroduction> introductions_;  // by rank

  std::vector<std::shared_ptr<Segment>> control_segments_;
  std::vector<Control> controls_;
  std::vector<std::atomic<bool>> left_;
  std::unique_ptr<DeviceSide> device_side_;  // CUDA only
  std::atomic<bool> connected_{false};       // controls_ and device_side_ are complete
  mutable std::mutex raise_mutex_;
  mutable bool told_self_ = false;  // true: this rank has written its slot of each board, once
  mutable Cause cause_;  // cause of the error in that slot, if it is a group's; under raise_mutex_
  std::map<int, const Operations*> operations_;  // by group; under raise_mutex_
  std::map<int, Explain> explanations_;          // by group; under raise_mutex_
  bool told_peers_ = false;

  SymmetricHeap heap_;
  std::mutex collective_mutex_;
  bool peers_know_ = false;         // true: peers know that the current collective call has failed
  Mesh* mesh_for_watch_ = nullptr;  // for the watch thread, which outlives mesh_'s value
  std::unique_ptr<Mesh> mesh_;      // last: its watch thread uses all of the above
};

}  // namespace xd
