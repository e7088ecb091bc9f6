// How bytes reach a rank that has no address here: a put into memory that it has exposed, with a
// tag that is reported there when the bytes are. docs/internals/net.md has the contract, and what
// stands on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/wire.h"

namespace xd::net {

// A region: memory of a rank as its peers name it. It travels to them as it is.
struct RegionHandle {
  std::uint64_t base = 0;  // the engine adds it to an offset in the region
  std::uint64_t key = 0;
  std::uint64_t bytes = 0;
};

// Memory of this rank that is registered with an engine: puts read from it, and peers put into it.
// The memory is the caller's. Destroying the object ends the registration; no put from or into the
// region may be under way then unless the engine has been closed, and the engine must still be
// there.
class Region {
 public:
  virtual ~Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::span<std::byte> memory() const { return memory_; }
  virtual RegionHandle remote() const = 0;

 protected:
  explicit Region(std::span<std::byte> memory) : memory_(memory) {}

 private:
  const std::span<std::byte> memory_;
};

struct Put {
  int peer = 0;
  const Region* from = nullptr;  // of the same engine
  std::size_t from_offset = 0;
  RegionHandle to;  // of the peer
  std::size_t to_offset = 0;
  std::size_t bytes = 0;  // may be 0: only the tag travels
  std::uint32_t tag = 0;
  std::uint64_t id = 0;
};

struct PeerFailure {
  int peer;  // -1 = the engine is of no use any more
  std::string text;
};

// An engine has room for as many findings, or more, until poll() takes them.
inline constexpr int kEngineEvents = 8192;

// The findings of poll(). It adds to the lists; the caller empties them.
struct Events {
  std::vector<std::uint32_t> arrived;  // tags of peers' puts
  std::vector<std::uint64_t> sent;     // ids of this rank's puts
  std::vector<PeerFailure> failed;
};

// Promises, and nothing beyond them:
//  - A put's tag is reported once at the peer, when its last byte can be read there. Until then its
//    bytes in the peer's region may be anything; from then on the engine leaves them alone.
//  - Nothing is said of the order of two puts, towards one peer or several, nor of a put's arrival
//    and its `sent`.
//  - A put's source stays as it is until its id is in `sent`, which the caller grants. `sent` says
//    that the source is free, and that the put needs this rank no longer: it arrives at a peer that
//    polls, though this rank polls no more, or closes the engine. Whether it has arrived, `sent`
//    does not say.
//  - The peer may have to poll until it has reported the put's tag. From then on `sent` comes by
//    this rank's poll() alone, whatever the peer does.
//  - A put may fail; then its peer is in `failed`, once for all puts towards it, and neither their
//    arrival nor their `sent` is promised any more. An engine may also never notice that a peer is
//    gone, so nobody may wait without an end.
//  - An id is in `sent` at most once.
//  - An exception of put() or poll() ends the use of the engine: whether a put was taken is not
//    said.
// Nothing blocks, but connect() may take milliseconds. Work is done in put() and poll() alone, on
// the caller's thread; one thread at a time.
class Engine {
 public:
  virtual ~Engine() = default;

  virtual std::size_t max_put() const = 0;  // bytes

  // Where peers reach this engine, in its own words: they give it to connect().
  virtual Bytes address() const = 0;
  // Once per peer, before the first put to it, and before the first of it: an engine may let in
  // nobody else. Throws if the address is none of this engine's.
  virtual void connect(int peer, std::span<const std::byte> address) = 0;

  // Where a peer is reached, for texts; empty = not known.
  virtual std::string place_of(int) const { return {}; }

  virtual std::unique_ptr<Region> expose(std::span<std::byte> memory) = 0;

  // False = not now: poll() first. Towards a peer that has failed it stays false.
  virtual bool put(const Put& put) = 0;
  virtual void poll(Events& events) = 0;

  // True = what is under way lies in buffers of the engine's own, so that a source is soon free.
  virtual bool buffers_puts() const { return false; }

  // False = anybody who reaches this engine can make tags, which are reported as those of peers.
  virtual bool vouches_for_tags() const { return true; }

  // To be asked before every sleep: a descriptor that becomes readable when poll() has something to
  // do; -1 = there may be something already, or the engine must be polled to get on.
  virtual int sleep_on() = 0;

  // A put has come from each peer so far, and one has gone to it: nobody new is let in before the
  // next connect(), where the engine can keep others out.
  virtual void shut() {}

  // Gives up whatever is under way and not `sent`: from now on no memory of this rank is read or
  // written, and puts of peers towards it fail. After that, regions and the engine may only be
  // destroyed.
  virtual void close() noexcept = 0;
};

}  // namespace xd::net
