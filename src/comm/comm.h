// The communicator: one rank's membership in a set of ranks.
//
// It owns the connections to the peers (mesh), the control segments with doorbells and error
// boards, and the symmetric heaps. Executors on the host wait for peers through wait_for() alone,
// which is bounded by the timeout and ends at once on a fatal error; kernels wait by themselves,
// using device_comm().
#pragma once

#include <crossdock/comm.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/interrupt.h"
#include "base/math.h"
#include "comm/collective.h"
#include "comm/device/kinds.h"
#include "comm/errors.h"
#include "comm/hosts.h"
#include "comm/join/catalogue.h"
#include "comm/join/place.h"
#include "comm/long_wait.h"
#include "comm/symmetric_memory.h"
#include "comm/views/views.h"
#include "meet/mesh.h"

namespace xd {

class Door;
class RemotePuts;

// Work for other ranks that a thread goes on with while it waits, because no other thread does it.
class Progress {
 public:
  // True = something has happened.
  virtual bool poll() = 0;
  // True = poll() gets on with something that has begun, so it is wanted again soon.
  virtual bool is_busy() = 0;

 protected:
  ~Progress() = default;
};

// A wait of the host: its place, for error texts, and its deadline, which is one for all peers of a
// phase.
struct HostWait {
  xd_phase phase;
  int group;
  int operation;
  std::uint64_t epoch;
  Deadline deadline;
  int timeout_ms = 0;  // the time that ends at the deadline; 0 = the communicator's
  // Whether the death of any rank ends the wait, since the operation cannot end without that rank.
  bool needs_all_ranks = false;
  // Whether a rank's replacement ends the wait: its successor has no part in the operation.
  bool needs_first_ranks = false;
  Progress* progress = nullptr;  // outlives the wait

  WaitPlace place() const { return {group, operation, phase, epoch, {}, deadline}; }
};

// How a wait for a peer has ended, where it has not thrown.
enum class Waited {
  ready,
  lost,  // the peer comes no more; or another rank, which the operation needs
  late,  // the deadline has passed
};

class Comm final {
 public:
  // Makes the communicator, as xd_comm_create describes it. `config` has been read with
  // read_struct.
  static std::shared_ptr<Comm> create(const xd_comm_config& config);

  struct Parts {
    int rank;
    int num_ranks;
    std::string name;
    DLDevice device;
    int timeout_ms;
    xd_comm_peer_loss on_peer_loss;
    std::unique_ptr<SegmentMaker> memory;           // shared memory of the device
    std::vector<DeviceIntroduction> introductions;  // by rank
    Segments boards;                                // in host memory
    std::unique_ptr<DeviceSide> device_side;        // CUDA only
    std::unique_ptr<EventRelay> events;             // to which the mesh reports
    std::unique_ptr<Mesh> mesh;                     // its watch thread runs already
    std::uint64_t serial = 0;                       // see serial()
    bool names_interface = false;                   // see names_interface()
  };
  // Takes the mesh only once nothing can fail any more.
  explicit Comm(Parts&& parts);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  const std::string& name() const { return name_; }
  const HostMap& hosts() const { return hosts_; }
  // The machines of the ranks, until close(). The folder `meet` calls a machine a host.
  const Rails& machines() const { return mesh_->rails(); }
  // The address of this rank's machine; with several machines, until close().
  std::string address() const { return mesh_->own_address(); }
  // The caller has named this address, or its interface.
  bool names_interface() const { return names_interface_; }
  DLDevice device() const { return device_; }
  int timeout_ms() const { return timeout_ms_; }
  int local_ranks() const { return local_ranks_; }
  // Ranks of this communicator, of any process, on this rank's device; itself included.
  int ranks_on_device() const;
  // Multiprocessors of this rank's device; 0 on the CPU.
  int multiprocessors() const { return introductions_[at(rank_)].multiprocessors; }
  Deadline deadline() const { return Deadline::after_ms(timeout_ms_); }

  // ---- Ranks that are replaced (comm/join) ----

  // Lets new processes in from now on, at a door with this secret.
  void open_door(const Secret& secret);
  // A rank that lets new processes in.
  bool is_elastic() const { return door_ != nullptr; }
  xd_unique_id invite() const;
  const Secret& door_secret() const;
  DoorPlace& door_place(NearRank rank) const;
  // The process of a rank as it was when this rank came.
  const PeerProcess& process_of(int rank) const { return mesh_->process_of(rank); }
  const std::vector<std::string>& host_names() const { return mesh_->host_names(); }
  // 0 = this process was there from the beginning; else it has taken a place, and no process has
  // the same number in that place.
  std::uint64_t serial() const { return serial_; }
  Catalogue& catalogue() { return catalogue_; }
  // The group that this rank is taking over from the process that had its place; nullptr = groups
  // are made by all ranks together.
  const AdoptedGroup* adopted() const { return adopted_ ? &*adopted_ : nullptr; }

  // The work of xd_comm_destroy: says goodbye. Groups may keep the object alive, but its calls fail
  // from now on.
  void close();

  Errors& errors() { return errors_; }
  const Errors& errors() const { return errors_; }
  Collective& collective() { return collective_; }
  Views& views() { return views_; }
  SymmetricMemory& memory() { return memory_; }
  SymmetricHeap& heap() { return memory_.heap(); }
  const SymmetricHeap& heap() const { return memory_.heap(); }

  // Allocates `bytes` of the devices' shared memory here (0 = none), and maps every rank's.
  // Collective.
  Segments share(CollectiveCall call, std::size_t bytes) {
    return adopted_ ? adopted_->memory : collective_.share(*device_memory_, call, bytes);
  }

  // The engine that channels to other machines share; nullptr before the first of them.
  RemotePuts* remote_puts() const { return remote_puts_.load(std::memory_order_acquire); }
  void keep_remote_puts(std::shared_ptr<RemotePuts> puts) noexcept;

  // Counts the groups: every rank counts each group that it is asked to make, also if that fails.
  void begin_group() { ++groups_; }
  // The collective call that makes one. It is no group where not all ranks have been asked.
  template <class Body>
  void make_group(CollectiveCall call, Body&& body) {
    if (serial_ != 0) return take_over_group(call, std::forward<Body>(body));
    begin_group();
    try {
      collective_.run(call, std::forward<Body>(body));
    } catch (...) {
      if (collective_.out_of_step()) --groups_;
      throw;
    }
  }
  int group_number() const { return groups_ - 1; }
  // A step of the making of a group: all ranks do it, unless this one takes the group over.
  void agree_on_group(CollectiveCall call, const std::function<void()>& work) {
    if (adopted_) return work();
    collective_.agree(call, [&work] {
      work();
      return Collective::Contribution{};
    });
  }

  // Throws INVALID_ARGUMENT while a stream of the device is captured.
  void require_not_captured(xd_stream stream) const;

  // The time that xd_comm_agree gives its peers where the caller says none: they may still wait in
  // an operation of low latency, one behind another.
  int agree_timeout_ms() const;
  // A group that masks waits so long in its operations.
  void note_group_wait(int timeout_ms);

  // Throws UNSUPPORTED if the ranks are on several machines, where `what` cannot be had so far.
  void require_all_near(const char* what) const;

  // The communicator as kernels of this rank know it. CUDA only.
  const DeviceComm& device_comm() const { return device_side_->device_comm(); }

  // ---- Waiting for peers (CPU executor) ----

  // Rings the peer's doorbell. Call it after storing flags (release) into that peer's memory.
  void ring(NearRank peer) const { errors_.bell(peer).ring(); }

  // Returns when ready() holds, which looks at flags of `peer` with acquire loads. `seen()` gives
  // the peer's last epoch for the error text. Throws the fatal error that ends the wait.
  template <class Ready, class Seen>
  void wait_for(int peer, const HostWait& site, Ready&& ready, Seen&& seen) {
    wait_for(peer, site, ready, seen, [peer] { return peer; });
  }
  // Likewise; `late()` gives the rank that is waited for, -1 where none is known. A timeout names
  // it, or the rank for which that one waits.
  template <class Ready, class Seen, class Late>
  void wait_for(int peer, const HostWait& site, Ready&& ready, Seen&& seen, Late&& late) {
    LongWait watched(errors_);
    const Waited ended = wait_watched(peer, site, ready, [&](Deadline::Clock::time_point since) {
      if (Deadline::Clock::now() >= watched.next_look(since)) watched.look(site.place(), late());
      return Deadline(watched.next_look(since));
    });
    if (ended == Waited::lost) fail_lost(missing(peer, site), site);
    if (ended == Waited::late) fail_timeout(late(), site, seen());
  }

  // An engine of the network may notice before the watch that a rank has ended. The watch names it
  // with its process or host, for all ranks alike, and gets this time for it.
  static constexpr int kVerdictMs = 1000;
  int verdict_ms() const { return std::min(kVerdictMs, timeout_ms()); }
  // Waits for that. True = a wait for `peer` at this place ends by a loss.
  bool is_lost_by_verdict(int peer, HostWait site) {
    site.progress = nullptr;
    site.timeout_ms = verdict_ms();
    site.deadline = Deadline::after_ms(site.timeout_ms);
    return wait(peer, site, [] { return false; }) == Waited::lost;
  }
  // True if nothing stores into memory any more on behalf of the rank as it was when this one came:
  // it has left, or its process has ended, which the system tells a little later than the end of
  // its connections. Where it has no descriptors of processes, that has to do.
  bool has_ended(int rank) const;
  // Throws the loss by which a wait for `peer` at this place has ended.
  [[noreturn]] void throw_lost(int peer, const HostWait& site) {
    fail_lost(missing(peer, site), site);
  }

  // Likewise, but leaves it to the caller what becomes of a peer that does not come. A fatal error
  // of the communicator is thrown.
  template <class Ready>
  Waited wait(int peer, const HostWait& site, Ready&& ready) {
    return wait_watched(peer, site, ready, [&](auto) { return site.deadline; });
  }

 private:
  AdoptedGroup next_group(CollectiveCall call);
  // A group that could not be taken over is the next one's again.
  template <class Body>
  void take_over_group(CollectiveCall call, Body&& body) {
    const int before = groups_;
    adopted_ = next_group(call);
    groups_ = adopted_->number + 1;
    try {
      std::forward<Body>(body)();
    } catch (...) {
      groups_ = before;
      adopted_.reset();
      throw;
    }
    adopted_.reset();
  }

  // `look(begun)` is called now and then, and returns when it wants to be called again.
  template <class Ready, class Look>
  Waited wait_watched(int peer, const HostWait& site, Ready&& ready, Look&& look) {
    if (ready()) return Waited::ready;
    Doorbell& bell = errors_.bell(hosts_.self());
    const auto begun = Deadline::Clock::now();
    auto since = begun;
    Interruption interruption;
    for (;;) {
      const std::uint32_t rings = bell.value();  // read before the flags: see Doorbell
      if (site.progress != nullptr && site.progress->poll()) since = Deadline::Clock::now();
      if (ready()) return Waited::ready;
      if (errors_.ends_wait(site.group, site.operation, site.epoch)) errors_.throw_if_failed();
      // A rank's end comes after its last flag, so the flags are looked at once more.
      if (missing(peer, site) >= 0 && !ready()) return Waited::lost;
      if (site.deadline.passed()) return Waited::late;
      if (Deadline::Clock::now() - since >= spin_) {
        bell.sleep(rings, interruption.next(earlier(look(begun), wake_up(site, since))));
        if (interruption.requested()) errors_.abort();
      } else {
        relax();
      }
    }
  }
  // The end of a sleep: nothing rings the bell for what comes over a network. The longer nothing
  // has come, the longer the naps, so that what comes is seen late by a sixteenth of its time at
  // most, and a long wait costs next to nothing.
  static Deadline wake_up(const HostWait& site, Deadline::Clock::time_point since) {
    if (site.progress == nullptr) return site.deadline;
    const auto now = Deadline::Clock::now();
    if (site.progress->is_busy()) since = now;
    const Deadline nap(
        now + std::clamp<std::chrono::nanoseconds>((now - since) / 16, kShortestNap, kLongestNap));
    return earlier(nap, site.deadline);
  }
  static Deadline earlier(const Deadline& a, const Deadline& b) {
    return a.when() < b.when() ? a : b;
  }
  static constexpr std::chrono::microseconds kShortestNap{50}, kLongestNap{5000};

  FatalError error_at(const HostWait& site, xd_status status, int peer) const;
  // The rank that a wait for `peer` would wait in vain for, or -1.
  int missing(int peer, const HostWait& site) const;
  [[noreturn]] void fail_lost(int peer, const HostWait& site);
  [[noreturn]] void fail_timeout(int peer, const HostWait& site, std::uint64_t seen);
  static void relax();

  const int rank_;
  const int num_ranks_;
  const std::string name_;
  const HostMap hosts_;
  const DLDevice device_;
  const int timeout_ms_;
  const int local_ranks_;
  const bool names_interface_;
  const std::chrono::nanoseconds spin_;
  std::atomic<int> groups_{0};
  std::atomic<int> longest_group_wait_ms_{0};
  const std::uint64_t serial_;
  Catalogue catalogue_;
  std::optional<AdoptedGroup> adopted_;

  const std::unique_ptr<SegmentMaker> device_memory_;
  const std::vector<DeviceIntroduction> introductions_;  // by rank
  const std::unique_ptr<DeviceSide> device_side_;        // CUDA only
  Errors errors_;
  Collective collective_;
  Views views_;
  SymmetricMemory memory_;
  std::shared_ptr<RemotePuts> kept_remote_puts_;
  std::atomic<RemotePuts*> remote_puts_{nullptr};
  std::unique_ptr<EventRelay> events_;
  std::unique_ptr<Mesh> mesh_;  // its watch thread uses all of the above
  std::unique_ptr<Door> door_;  // and its thread that as well
};

}  // namespace xd
