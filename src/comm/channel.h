// Puts into the memory of one peer, with counts there: the weak channel of
// include/crossdock/channel.h, over the memory of a near rank or an engine of src/net.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "comm/comm.h"
#include "comm/near_memory.h"
#include "comm/remote/puts.h"

namespace xd {

inline constexpr CollectiveCall kCreateChannel{"xd_channel_create"};

// One thread at a time.
class Channel final {
 public:
  struct Config {
    int peer;
    std::byte* memory;  // in this rank's symmetric memory
    std::size_t bytes;
    std::uint32_t counters;
  };

  // Steps of kCreateChannel, of which nothing fails after the last.
  Channel(std::shared_ptr<Comm> comm, const Config& config);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  const Comm& comm() const { return *comm_; }

  void put(std::size_t to, const std::byte* from, std::size_t bytes, std::uint32_t counter);
  void wait(std::uint32_t counter, std::uint64_t count);
  // Whether a wait would end now. Takes in what the network has brought; never waits.
  bool test(std::uint32_t counter, std::uint64_t count);
  void flush();

 private:
  // The facts about this rank that all ranks must know.
  struct Offer {
    std::int32_t peer;
    std::uint32_t counters;
    std::uint64_t segment, offset;  // of its memory in the heap
    std::uint64_t bytes;
  };
  // The peer's memory, where it is near.
  struct NearEnd {
    NearRank rank;
    NearMemory counts, memory;
  };

  Offer offer() const;
  // True if the channel of some rank leads to another machine.
  bool read_offers();
  void connect_remote();
  void connect_near();
  void open_remote_puts();
  void put_near(std::size_t to, const std::byte* from, std::size_t bytes,
                std::uint32_t counter) const;
  NearMemory own_count(std::uint32_t counter) const;
  void get_on();
  // `to_do()` says what the peer has to do, for the text of a timeout.
  template <class Ready, class ToDo>
  void wait_for(Ready&& ready, ToDo&& to_do);
  const RemotePuts::Failure* failure() const { return remote_ ? remote_->failure() : nullptr; }
  [[noreturn]] void throw_failure(const RemotePuts::Failure& failure);
  // The process with which the channel was made takes part in nothing any more.
  bool is_lost() const { return comm_->errors().lost(config_.peer) || is_replaced(); }
  bool is_replaced() const { return comm_->errors().incarnation(config_.peer) != incarnation_; }
  [[noreturn]] void throw_lost();
  HostWait site() const;

  const std::shared_ptr<Comm> comm_;
  const Config config_;
  Offer own_{}, theirs_{};
  std::uint32_t incarnation_ = 0;  // of the peer
  Segments counts_;  // a word for each counter; a near peer writes here, or else RemotePuts
  std::optional<NearEnd> near_;
  std::optional<RemoteEnd> remote_;
};

}  // namespace xd
