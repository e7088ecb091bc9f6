// Puts into the memory of one peer, with counts there: the weak channel of
// include/crossdock/channel.h, over the memory of a near rank or an engine of src/net.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "comm/comm.h"
#include "comm/near_memory.h"
#include "net/engine.h"

namespace xd {

// One thread at a time.
class Channel final : public Progress {
 public:
  struct Config {
    int peer;
    std::byte* memory;  // in this rank's symmetric memory
    std::size_t bytes;
    std::uint32_t slots;
  };

  // Collective.
  Channel(std::shared_ptr<Comm> comm, const Config& config);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  const Comm& comm() const { return *comm_; }

  void put(std::size_t to, const std::byte* from, std::size_t bytes, std::uint32_t slot);
  void wait(std::uint32_t slot, std::uint64_t count);
  void flush();

  // Takes in what the network has brought. Used by waits.
  bool poll() override;
  bool is_busy() override;

 private:
  // What the peer must know of this rank.
  struct Offer {
    std::int32_t peer;
    std::uint32_t slots;
    std::uint64_t segment, offset;  // of its memory in the heap
    std::uint64_t bytes;
  };

  Offer offer() const;
  void meet();
  void open_engine();
  void put_near(std::size_t to, const std::byte* from, std::size_t bytes, std::uint32_t slot) const;
  NearMemory count(const NearMemory& counts, std::uint32_t slot) const {
    return counts.from(slot * sizeof(std::uint64_t));
  }
  template <class Ready>
  void wait_for(const std::string& what, Ready&& ready);
  [[noreturn]] void throw_broken();
  HostWait site();

  const std::shared_ptr<Comm> comm_;
  const Config config_;
  Offer theirs_{};
  bool is_near_ = true;
  Segments counts_;  // a word for each slot; a near peer writes here, or else poll()
  NearMemory own_counts_, their_counts_, their_memory_;

  // Between machines.
  std::unique_ptr<net::Engine> engine_;
  std::unique_ptr<net::Room> room_;  // of config_.memory
  net::RemoteRoom their_room_;
  std::uint64_t under_way_ = 0;  // puts whose source is not free
  net::Events events_;
  std::optional<std::string> broken_;  // what the engine has said
  bool has_verdict_ = false;           // the watch has been asked about that
};

}  // namespace xd
