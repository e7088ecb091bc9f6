// Puts of a communicator's channels into memory on other machines. All channels share one engine of
// src/net, so that whoever waits for one of them gets on with all.
//
// A put carries its tag alone, which has the number of an end and one of its counters. The receiver
// numbers its ends, and gives each number once: what is under way to an end that is there no more
// counts for no other. Regions are whole segments of symmetric memory, which stay as long as the
// communicator, so that such puts still have a place to come to.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/deadline.h"
#include "comm/comm.h"
#include "comm/near_memory.h"
#include "memory/heap.h"
#include "net/engine.h"

namespace xd {

class RemoteEnd;

// Any thread.
class RemotePuts final : public Progress {
 public:
  RemotePuts(Comm& comm, std::unique_ptr<net::Engine> engine)
      : comm_(comm), engine_(std::move(engine)) {}
  RemotePuts(const RemotePuts&) = delete;
  RemotePuts& operator=(const RemotePuts&) = delete;

  // The engine's failure on the way to a peer, which is of no use from then on.
  struct Failure {
    xd_status status;
    std::array<char, 256> text;
    Deadline verdict;  // until then the watch may name a lost rank as the reason
  };
  // Nullptr = none. The object stays.
  const Failure* failure(int peer) const;

  // Takes in what the network has brought for any end, and rings this rank's bell for the threads
  // that wait for it.
  bool poll() override;
  bool is_busy() override;

  // Gives the engine up: nobody reads or writes memory of this rank from then on, and ends do
  // nothing any more.
  void close();
  // In a fork, where the connections are the parent's.
  void leave_behind();

 private:
  friend class RemoteEnd;

  static constexpr std::uint32_t kGreeting = 0xffff;  // no end has this number
  static constexpr int kEngine = -1;                  // in the place of a peer, as in PeerFailure
  static std::uint32_t tag(std::uint32_t number, std::uint32_t counter) {
    return number << 16 | counter;
  }

  std::uint32_t enlist(RemoteEnd& end);
  void delist(const RemoteEnd& end);
  const net::Region& region(std::uint32_t segment);
  Bytes address() const;
  void connect(int peer, std::span<const std::byte> address);
  std::string place_of(int peer) const;
  void shut();
  std::size_t max_put() const;
  bool put(RemoteEnd& end, const net::Put& put);
  bool is_closed() const { return engine_ == nullptr; }
  const Failure* failure_locked(int peer) const;
  void on_arrival(std::uint32_t tag);
  void give_up(int peer, xd_status status, const char* text);
  void give_up_engine() noexcept;

  Comm& comm_;
  mutable std::mutex mutex_;  // guards all below
  std::unique_ptr<net::Engine> engine_;
  std::map<std::uint32_t, std::unique_ptr<net::Region>> regions_;  // by segment
  std::set<int> connected_;
  std::unordered_map<std::uint32_t, RemoteEnd*> ends_;  // by number
  std::uint32_t next_number_ = 0;
  net::Events events_;
  std::map<int, Failure> failures_;  // by peer
  std::optional<Failure> engine_failure_;
};

// This rank's end of a channel to another machine. It is made in the steps of a collective call:
// offer(), accept(), greet().
class RemoteEnd {
 public:
  struct Config {
    int peer;
    HeapAddress place;  // of the channel's memory in this rank's heap
    NearMemory counts;  // a word for each counter, which RemotePuts raises
    std::uint32_t counters;
  };

  RemoteEnd(RemotePuts& puts, const Config& config);
  ~RemoteEnd();
  RemoteEnd(const RemoteEnd&) = delete;
  RemoteEnd& operator=(const RemoteEnd&) = delete;

  // The bytes that the peer's accept() takes.
  Bytes offer() const;
  // `bytes`: of the peer's memory. Throws MISMATCH where the offer is none, or has less.
  void accept(std::span<const std::byte> offer, std::size_t bytes);
  // Makes the connection; throws TIMEOUT or SYSTEM where no data come through.
  void greet();

  std::size_t max_put() const { return puts_.max_put(); }
  // False = not now, or the way to the peer has failed. Both offsets are in the channel's memory.
  bool put(std::size_t to, std::size_t from, std::size_t bytes, std::uint32_t counter);
  // Whether the source of a put is not free.
  bool is_under_way() const { return under_way_.load(std::memory_order_acquire) != 0; }
  const RemotePuts::Failure* failure() const { return puts_.failure(config_.peer); }

 private:
  friend class RemotePuts;

  struct Offer {
    net::RegionHandle region;  // the segment
    std::uint64_t offset;      // of the channel's memory in it
    std::uint64_t number;
  };

  // Theirs, which is what tags have.
  std::uint32_t number() const { return static_cast<std::uint32_t>(theirs_.number); }
  bool put_greeting();

  RemotePuts& puts_;
  const Config config_;
  const net::Region& region_;
  const std::uint32_t number_;  // ours
  Offer theirs_{};
  std::atomic<std::uint64_t> under_way_{0};
  std::atomic<bool> greeted_{false};
};

}  // namespace xd
