#include "comm/channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/wire.h"
#include "comm/far_engine.h"

namespace xd {
namespace {

constexpr CollectiveCall kCreateChannel{"xd_channel_create"};
constexpr std::uint32_t kMaxSlots = 65536;

// [begin, begin + bytes) of a memory of `all` bytes.
bool lies_in(std::size_t begin, std::size_t bytes, std::size_t all) {
  return begin <= all && bytes <= all - begin;
}

}  // namespace

Channel::Channel(std::shared_ptr<Comm> comm, const Config& config)
    : comm_(std::move(comm)), config_(config) {
  comm_->collective().run(kCreateChannel, [this] { meet(); });
}

// Whoever closes an engine knows that nobody writes into its memory from then on.
Channel::~Channel() {
  if (!engine_) return;
  if (comm_->errors().in_fork()) {  // the connections are the parent's
    [[maybe_unused]] const net::Room* room = room_.release();
    [[maybe_unused]] const net::Engine* engine = engine_.release();
    return;
  }
  engine_->close();
}

Channel::Offer Channel::offer() const {
  if (comm_->device().device_type != kDLCPU) {
    fail(XD_ERROR_UNSUPPORTED, "channels are there for communicators on the CPU");
  }
  XD_REQUIRE(config_.peer >= 0 && config_.peer < comm_->num_ranks(), "peer = ", config_.peer,
             ", expected 0 to ", comm_->num_ranks() - 1);
  XD_REQUIRE(config_.slots >= 1 && config_.slots <= kMaxSlots, "slots = ", config_.slots,
             ", expected 1 to ", kMaxSlots);
  const auto place = comm_->heap().find(config_.memory, config_.bytes);
  XD_REQUIRE(place, "symmetric: expected ", config_.bytes,
             " bytes of this rank's symmetric memory (xd_mem_alloc)");
  return {.peer = config_.peer,
          .slots = config_.slots,
          .segment = place->segment,
          .offset = place->offset,
          .bytes = config_.bytes};
}

void Channel::meet() {
  const auto offers = comm_->collective().agree_on(kCreateChannel, [this] { return offer(); });
  bool all_near = true;
  for (int r = 0; r < comm_->num_ranks(); ++r) {
    const int peer = offers[at(r)].peer, back = offers[at(peer)].peer;
    if (back != r) {
      fail(XD_ERROR_MISMATCH, "rank ", r, " names rank ", peer, " as its peer, which names rank ",
           back, ", expected rank ", r);
    }
    all_near = all_near && comm_->machines().host_of(r) == comm_->machines().host_of(peer);
  }
  theirs_ = offers[at(config_.peer)];
  is_near_ = comm_->hosts().is_near(config_.peer);
  counts_ = comm_->share(kCreateChannel, config_.slots * sizeof(std::uint64_t));
  own_counts_ = NearMemory(counts_[at(comm_->rank())]->base());
  // All ranks open engines where one needs one.
  if (!all_near) open_engine();
  comm_->collective().agree(kCreateChannel, [this] {
    if (!is_near_) return Collective::Contribution{};
    const auto& counts = counts_[at(config_.peer)];
    require_size(counts, theirs_.slots * sizeof(std::uint64_t), config_.peer);
    their_counts_ = NearMemory(counts->base());
    their_memory_ = NearMemory(comm_->heap().address(
        config_.peer, {static_cast<std::uint32_t>(theirs_.segment), theirs_.offset},
        theirs_.bytes));
    if (!their_memory_) fail(XD_ERROR_MISMATCH, "rank ", config_.peer, " has no such memory");
    return Collective::Contribution{};
  });
}

void Channel::open_engine() {
  engine_ = open_engine_together(*comm_, kCreateChannel);
  const auto items = comm_->collective().agree(kCreateChannel, [this] {
    room_ = engine_->expose({config_.memory, config_.bytes});
    WireWriter writer;
    writer.put(room_->remote());
    writer.put_bytes(engine_->address());
    return Collective::Contribution{.blob = writer.take()};
  });
  comm_->collective().agree(kCreateChannel, [&] {
    if (is_near_) return Collective::Contribution{};
    WireReader reader(items[at(config_.peer)].blob);
    their_room_ = reader.take<net::RemoteRoom>();
    if (!reader.ok()) fail(XD_ERROR_MISMATCH, "rank ", config_.peer, " offers no memory");
    engine_->connect(config_.peer, reader.rest());
    return Collective::Contribution{};
  });
}

void Channel::put(std::size_t to, const std::byte* from, std::size_t bytes, std::uint32_t slot) {
  comm_->errors().check_usable();
  XD_REQUIRE(slot < theirs_.slots, "slot = ", slot, ", expected less than ", theirs_.slots,
             ", the slots of rank ", config_.peer);
  XD_REQUIRE(lies_in(to, bytes, theirs_.bytes), "to = ", to, ", bytes = ", bytes,
             ": expected to lie in the ", theirs_.bytes, " bytes of rank ", config_.peer);
  const auto offset = bytes == 0 ? 0 : static_cast<std::size_t>(from - config_.memory);
  XD_REQUIRE(lies_in(offset, bytes, config_.bytes), "from: expected ", bytes, " bytes in the ",
             config_.bytes, " of this rank's memory of the channel");
  if (is_near_) return put_near(to, from, bytes, slot);
  XD_REQUIRE(bytes <= engine_->max_put(), "bytes = ", bytes, ", expected at most ",
             engine_->max_put(), " in one put");
  const net::Put put{.peer = config_.peer,
                     .from = room_.get(),
                     .from_offset = offset,
                     .to = their_room_,
                     .to_offset = to,
                     .bytes = bytes,
                     .tag = slot};
  // It is made once, however often the wait asks.
  bool made = false;
  const std::string what = concat("rank ", config_.peer, " to take in puts: this one was not made");
  wait_for(what, [&] { return made = made || engine_->put(put); });
  ++under_way_;
}

// The peer's count is this rank's to write, and this thread's.
void Channel::put_near(std::size_t to, const std::byte* from, std::size_t bytes,
                       std::uint32_t slot) const {
  if (bytes > 0) std::memmove(their_memory_.address(to), from, bytes);
  const NearMemory counted = count(their_counts_, slot);
  counted.signal(counted.seen() + 1);
  for (const NearRank near : comm_->hosts().near())
    if (near == config_.peer) comm_->ring(near);
}

void Channel::wait(std::uint32_t slot, std::uint64_t count) {
  comm_->errors().check_usable();
  XD_REQUIRE(slot < config_.slots, "slot = ", slot, ", expected less than ", config_.slots);
  const NearMemory counted = this->count(own_counts_, slot);
  const std::string what =
      concat("rank ", config_.peer, " to put: count ", count, " of slot ", slot, " here");
  wait_for(what, [&] { return counted.seen() >= count; });
}

void Channel::flush() {
  comm_->errors().check_usable();
  wait_for(concat("puts to rank ", config_.peer, ", which may have to call this channel"),
           [this] { return under_way_ == 0; });
}

bool Channel::poll() {
  if (broken_) return false;
  try {
    engine_->poll(events_);
  } catch (const Error& error) {
    broken_ = error.text();
    return true;
  }
  for (const std::uint32_t slot : events_.arrived) {
    if (slot >= config_.slots) {
      broken_ = concat("a put arrived for slot ", slot, " of ", config_.slots);
      continue;
    }
    const NearMemory counted = count(own_counts_, slot);
    counted.signal(counted.seen() + 1);
  }
  under_way_ -= std::min<std::uint64_t>(under_way_, events_.sent.size());
  if (!events_.failed.empty()) broken_ = events_.failed.front().text;
  const bool news = !events_.arrived.empty() || !events_.sent.empty() || broken_;
  events_ = {};
  return news;
}

bool Channel::is_busy() { return engine_->sleep_on() < 0; }

HostWait Channel::site() {
  return {.phase = XD_PHASE_HOST,
          .group = -1,
          .operation = -1,
          .epoch = 0,
          .deadline = comm_->deadline(),
          .progress = is_near_ ? nullptr : this};
}

template <class Ready>
void Channel::wait_for(const std::string& what, Ready&& ready) {
  const HostWait site = this->site();
  const Waited ended =
      comm_->wait(config_.peer, site, [&] { return ready() || broken_.has_value(); });
  if (ended == Waited::ready && (!broken_ || ready())) return;
  if (broken_) throw_broken();
  if (ended == Waited::lost) comm_->throw_lost(config_.peer, site);
  throw Error(XD_ERROR_TIMEOUT, concat("waited ", comm_->timeout_ms(), " ms for ", what),
              config_.peer);
}

// The watch says whether the peer has ended, and is asked once.
void Channel::throw_broken() {
  const bool asked = std::exchange(has_verdict_, true);
  if (!asked && comm_->is_lost_by_verdict(config_.peer, site()))
    comm_->throw_lost(config_.peer, site());
  throw Error(XD_ERROR_SYSTEM,
              concat("network towards rank ", config_.peer, ": ", *broken_,
                     "; it may have destroyed its end of the channel"),
              config_.peer);
}

}  // namespace xd
