#include "comm/channel.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "comm/remote/network.h"

namespace xd {
namespace {

constexpr std::uint32_t kMaxCounters = 65536;

// [begin, begin + bytes) of a memory of `all` bytes.
bool lies_in(std::size_t begin, std::size_t bytes, std::size_t all) {
  return begin <= all && bytes <= all - begin;
}

NearMemory count_in(const NearMemory& counts, std::uint32_t counter) {
  return counts.from(counter * sizeof(std::uint64_t));
}

}  // namespace

Channel::Channel(std::shared_ptr<Comm> comm, const Config& config)
    : comm_(std::move(comm)), config_(config) {
  const bool any_remote = read_offers();
  if (any_remote && comm_->remote_puts() == nullptr) open_remote_puts();
  counts_ = comm_->share(kCreateChannel, config_.counters * sizeof(std::uint64_t));
  if (any_remote) connect_remote();
  comm_->collective().agree(kCreateChannel, [&] {
    if (remote_) remote_->greet();
    if (!remote_) connect_near();
    return Collective::Contribution{};
  });
}

Channel::Offer Channel::offer() const {
  if (comm_->device().device_type != kDLCPU) {
    fail(XD_ERROR_UNSUPPORTED, "channels are there for communicators on the CPU");
  }
  XD_REQUIRE(config_.peer >= 0 && config_.peer < comm_->num_ranks(), "peer = ", config_.peer,
             ", expected 0 to ", comm_->num_ranks() - 1);
  XD_REQUIRE(config_.counters >= 1 && config_.counters <= kMaxCounters,
             "counters = ", config_.counters, ", expected 1 to ", kMaxCounters);
  const auto place = comm_->heap().find_allocated(config_.memory, config_.bytes);
  XD_REQUIRE(place, "symmetric: expected ", config_.bytes,
             " bytes of this rank's symmetric memory, in one allocation (xd_mem_alloc)");
  return {.peer = config_.peer,
          .counters = config_.counters,
          .segment = place->segment,
          .offset = place->offset,
          .bytes = config_.bytes};
}

bool Channel::read_offers() {
  static_assert(std::has_unique_object_representations_v<Offer>, "padding must not leave");
  const auto offers = comm_->collective().agree_on(kCreateChannel, [this] { return offer(); });
  bool any_remote = false;
  for (int r = 0; r < comm_->num_ranks(); ++r) {
    const int peer = offers[at(r)].peer, back = offers[at(peer)].peer;
    if (back != r) {
      fail(XD_ERROR_MISMATCH, "rank ", r, " names rank ", peer, " as its peer, which names rank ",
           back, ", expected rank ", r);
    }
    any_remote = any_remote || comm_->machines().host_of(r) != comm_->machines().host_of(peer);
  }
  own_ = offers[at(comm_->rank())];
  theirs_ = offers[at(config_.peer)];
  incarnation_ = comm_->errors().incarnation(config_.peer);
  return any_remote;
}

// All ranks come to have them in the same step.
void Channel::open_remote_puts() {
  auto engine = network().open_together(*comm_, kCreateChannel);
  std::shared_ptr<RemotePuts> puts;
  comm_->collective().agree(kCreateChannel, [&] {
    puts = std::make_shared<RemotePuts>(*comm_, std::move(engine));
    return Collective::Contribution{};
  });
  comm_->keep_remote_puts(std::move(puts));
}

void Channel::connect_remote() {
  const bool is_remote = !comm_->hosts().is_near(config_.peer);
  const auto items = comm_->collective().agree(kCreateChannel, [&] {
    if (!is_remote) return Collective::Contribution{};
    const HeapAddress place{static_cast<std::uint32_t>(own_.segment), own_.offset};
    remote_.emplace(*comm_->remote_puts(), RemoteEnd::Config{.peer = config_.peer,
                                                             .place = place,
                                                             .counts = own_count(0),
                                                             .counters = config_.counters});
    return Collective::Contribution{.blob = remote_->offer()};
  });
  // No rank greets before its peer knows the way back.
  comm_->collective().agree(kCreateChannel, [&] {
    if (is_remote) remote_->accept(items[at(config_.peer)].blob, theirs_.bytes);
    return Collective::Contribution{};
  });
}

void Channel::connect_near() {
  const auto& near = comm_->hosts().near();
  const auto peer = std::ranges::find(near, config_.peer);
  const auto& counts = counts_[at(config_.peer)];
  require_size(counts, theirs_.counters * sizeof(std::uint64_t), config_.peer);
  const HeapAddress place{static_cast<std::uint32_t>(theirs_.segment), theirs_.offset};
  const NearMemory memory(comm_->heap().address(config_.peer, place, theirs_.bytes));
  if (!memory) fail(XD_ERROR_MISMATCH, "rank ", config_.peer, " has no such memory");
  near_ = NearEnd{.rank = *peer, .counts = NearMemory(counts->base()), .memory = memory};
}

// Every call gets on with the puts of all channels, whether it waits or not.
void Channel::get_on() {
  if (RemotePuts* const puts = comm_->remote_puts()) puts->poll();
}

NearMemory Channel::own_count(std::uint32_t counter) const {
  return count_in(NearMemory(counts_[at(comm_->rank())]->base()), counter);
}

void Channel::put(std::size_t to, const std::byte* from, std::size_t bytes, std::uint32_t counter) {
  comm_->errors().check_usable();
  XD_REQUIRE(counter < theirs_.counters, "counter = ", counter, ", expected less than ",
             theirs_.counters, ", the counters of rank ", config_.peer);
  XD_REQUIRE(lies_in(to, bytes, theirs_.bytes), "to = ", to, ", bytes = ", bytes,
             ": expected to lie in the ", theirs_.bytes, " bytes of rank ", config_.peer);
  const std::size_t offset = bytes == 0 ? 0
                                        : reinterpret_cast<std::uintptr_t>(from) -
                                              reinterpret_cast<std::uintptr_t>(config_.memory);
  XD_REQUIRE(lies_in(offset, bytes, config_.bytes), "from: expected ", bytes, " bytes in the ",
             config_.bytes, " of this rank's memory of the channel");
  if (is_lost()) throw_lost();
  if (near_) {
    put_near(to, from, bytes, counter);
    return get_on();
  }
  const std::size_t most = remote_->max_put();
  XD_REQUIRE(bytes <= most, "bytes = ", bytes, ", expected at most ", most, " in one put");
  // It is made once, however often the wait asks.
  bool made = false;
  wait_for([&] { return made = made || remote_->put(to, offset, bytes, counter); },
           [&] { return "take in puts: this one was not made"; });
}

// The peer's count is this rank's to write, and this thread's.
void Channel::put_near(std::size_t to, const std::byte* from, std::size_t bytes,
                       std::uint32_t counter) const {
  if (bytes > 0) std::memmove(near_->memory.address(to), from, bytes);
  const NearMemory counted = count_in(near_->counts, counter);
  counted.signal(counted.seen() + 1);
  comm_->ring(near_->rank);
}

void Channel::wait(std::uint32_t counter, std::uint64_t count) {
  comm_->errors().check_usable();
  XD_REQUIRE(counter < config_.counters, "counter = ", counter, ", expected less than ",
             config_.counters);
  const NearMemory counted = own_count(counter);
  wait_for([&] { return counted.seen() >= count; },
           [&] { return concat("put: count ", count, " of counter ", counter, " here"); });
}

bool Channel::test(std::uint32_t counter, std::uint64_t count) {
  comm_->errors().check_usable();
  XD_REQUIRE(counter < config_.counters, "counter = ", counter, ", expected less than ",
             config_.counters);
  const NearMemory counted = own_count(counter);
  get_on();
  if (counted.seen() >= count) return true;
  const bool is_lost = this->is_lost();
  const RemotePuts::Failure* const failed = failure();
  // Puts that came before the end are there now.
  if ((is_lost || failed != nullptr) && counted.seen() >= count) return true;
  if (is_lost) throw_lost();
  if (failed != nullptr && failed->verdict.passed()) throw_failure(*failed);
  return false;
}

void Channel::flush() {
  comm_->errors().check_usable();
  wait_for([this] { return !remote_ || !remote_->is_under_way(); },
           [] { return "take in puts, for which it may have to call a channel"; });
}

HostWait Channel::site() const {
  return {.phase = XD_PHASE_HOST,
          .group = -1,
          .operation = -1,
          .epoch = 0,
          .deadline = comm_->deadline(),
          .progress = comm_->remote_puts()};
}

template <class Ready, class ToDo>
void Channel::wait_for(Ready&& ready, ToDo&& to_do) {
  get_on();
  const Waited ended = comm_->wait(
      config_.peer, site(), [&] { return ready() || failure() != nullptr || is_replaced(); });
  const RemotePuts::Failure* const failed = failure();
  const bool is_replaced = this->is_replaced();
  if (ended == Waited::ready && ((failed == nullptr && !is_replaced) || ready())) return;
  if (ended == Waited::lost || is_replaced) throw_lost();
  if (failed != nullptr) throw_failure(*failed);
  throw Error(
      XD_ERROR_TIMEOUT,
      concat("waited ", comm_->timeout_ms(), " ms for rank ", config_.peer, " to ", to_do()),
      config_.peer);
}

// The watch says whether the peer has ended, and has some time for it.
void Channel::throw_failure(const RemotePuts::Failure& failure) {
  HostWait site = this->site();
  site.deadline = failure.verdict;
  if (comm_->wait(config_.peer, site, [] { return false; }) == Waited::lost) throw_lost();
  throw Error(failure.status,
              concat("network towards rank ", config_.peer, ": ", failure.text.data()),
              config_.peer);
}

// Where losses are masked, this channel alone is of no use any more.
void Channel::throw_lost() {
  if (comm_->errors().masks_losses()) comm_->errors().throw_masked_loss(config_.peer);
  comm_->throw_lost(config_.peer, site());
}

}  // namespace xd
