#include "comm/remote/puts.h"

#include <cstdio>
#include <utility>

#include "base/error.h"
#include "base/wire.h"
#include "comm/remote/first_contact.h"

namespace xd {

const RemotePuts::Failure* RemotePuts::failure(int peer) const {
  const std::lock_guard lock(mutex_);
  return failure_locked(peer);
}

const RemotePuts::Failure* RemotePuts::failure_locked(int peer) const {
  if (engine_failure_) return &*engine_failure_;
  const auto found = failures_.find(peer);
  return found != failures_.end() ? &found->second : nullptr;
}

// A thread that finds another one here leaves the work to it.
bool RemotePuts::poll() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || is_closed() || engine_failure_) return false;
  try {
    engine_->poll(events_);
  } catch (...) {
    give_up_engine();
  }
  const bool news = !events_.arrived.empty() || !events_.sent.empty() || !events_.failed.empty() ||
                    engine_failure_;
  for (const std::uint32_t tag : events_.arrived) on_arrival(tag);
  events_.arrived.clear();
  for (const std::uint64_t id : events_.sent) {
    const auto end = ends_.find(static_cast<std::uint32_t>(id));
    // Release: who sees that nothing is under way changes the sources.
    if (end != ends_.end()) end->second->under_way_.fetch_sub(1, std::memory_order_release);
  }
  events_.sent.clear();
  for (; !events_.failed.empty(); events_.failed.pop_back()) {
    const net::PeerFailure& failed = events_.failed.back();
    give_up(failed.peer, XD_ERROR_SYSTEM, failed.text.c_str());
  }
  if (news) comm_.ring(comm_.hosts().self());
  return news;
}

bool RemotePuts::is_busy() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock && !is_closed() && !engine_failure_ && engine_->sleep_on() < 0;
}

// Nobody else writes these counts, and one thread at a time is here.
void RemotePuts::on_arrival(std::uint32_t tag) {
  const std::uint32_t number = tag >> 16, counter = tag & 0xffff;
  const bool is_greeting = number == kGreeting;
  const auto found = ends_.find(is_greeting ? counter : number);
  if (found == ends_.end()) return;  // it has been destroyed
  RemoteEnd& end = *found->second;
  if (is_greeting) {
    end.greeted_.store(true, std::memory_order_release);
    return;
  }
  if (counter >= end.config_.counters) {
    if (!engine_->vouches_for_tags()) return;  // it is a stranger's
    return give_up(end.config_.peer, XD_ERROR_INTERNAL,
                   "a put arrived for a counter that is not there");
  }
  const NearMemory count = end.config_.counts.from(counter * sizeof(std::uint64_t));
  count.signal(count.seen() + 1);
}

// The first word counts.
void RemotePuts::give_up(int peer, xd_status status, const char* text) {
  Failure failure{.status = status, .text = {}, .verdict = Deadline::after_ms(comm_.verdict_ms())};
  std::snprintf(failure.text.data(), failure.text.size(), "%s", text);
  if (peer != kEngine) {
    failures_.emplace(peer, failure);
  } else if (!engine_failure_) {
    engine_failure_ = failure;
  }
}

// Inside a catch block: what the engine has thrown ends its use.
void RemotePuts::give_up_engine() noexcept {
  std::array<char, 256> text;
  const Caught error = caught(text);
  give_up(kEngine, error.status, text.data());
}

void RemotePuts::close() {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return;
  engine_->close();
  regions_.clear();
  engine_.reset();
}

// Another thread of the parent may have held the lock.
void RemotePuts::leave_behind() {
  for (auto& [segment, region] : regions_)
    [[maybe_unused]] const net::Region* left = region.release();
  [[maybe_unused]] const net::Engine* engine = engine_.release();
}

std::uint32_t RemotePuts::enlist(RemoteEnd& end) {
  const std::lock_guard lock(mutex_);
  if (next_number_ == kGreeting) {
    fail(XD_ERROR_UNSUPPORTED, "this rank has had ", kGreeting,
         " channels to other machines, the most on one communicator");
  }
  ends_.emplace(next_number_, &end);
  return next_number_++;
}

void RemotePuts::delist(const RemoteEnd& end) {
  if (comm_.errors().in_fork()) return;  // a fork's copy of the lock may be held for ever
  const std::lock_guard lock(mutex_);
  ends_.erase(end.number_);
}

const net::Region& RemotePuts::region(std::uint32_t segment) {
  const std::lock_guard lock(mutex_);
  auto& region = regions_[segment];
  if (!region) {
    const HeapRange range = comm_.heap().range(comm_.rank(), segment);
    region = engine_->expose({range.base, range.bytes});
  }
  return *region;
}

bool RemotePuts::put(RemoteEnd& end, const net::Put& put) {
  const std::lock_guard lock(mutex_);
  if (is_closed() || failure_locked(put.peer) != nullptr) return false;
  try {
    if (!engine_->put(put)) return false;
  } catch (...) {
    give_up_engine();
    return false;
  }
  end.under_way_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void RemotePuts::connect(int peer, std::span<const std::byte> address) {
  const std::lock_guard lock(mutex_);
  if (connected_.contains(peer)) return;
  engine_->connect(peer, address);
  connected_.insert(peer);
}

Bytes RemotePuts::address() const {
  const std::lock_guard lock(mutex_);
  return engine_->address();
}

std::string RemotePuts::place_of(int peer) const {
  const std::lock_guard lock(mutex_);
  return engine_->place_of(peer);
}

void RemotePuts::shut() {
  const std::lock_guard lock(mutex_);
  if (!is_closed()) engine_->shut();
}

std::size_t RemotePuts::max_put() const {
  const std::lock_guard lock(mutex_);
  return is_closed() ? 0 : engine_->max_put();
}

RemoteEnd::RemoteEnd(RemotePuts& puts, const Config& config)
    : puts_(puts),
      config_(config),
      region_(puts.region(config.place.segment)),
      number_(puts.enlist(*this)) {}

RemoteEnd::~RemoteEnd() { puts_.delist(*this); }

Bytes RemoteEnd::offer() const {
  WireWriter writer;
  writer.put(Offer{.region = region_.remote(), .offset = config_.place.offset, .number = number_});
  writer.put_bytes(puts_.address());
  return writer.take();
}

void RemoteEnd::accept(std::span<const std::byte> offer, std::size_t bytes) {
  WireReader reader(offer);
  theirs_ = reader.take<Offer>();
  const std::uint64_t all = theirs_.region.bytes;
  if (!reader.ok() || theirs_.number >= RemotePuts::kGreeting || theirs_.offset > all ||
      bytes > all - theirs_.offset) {
    fail(XD_ERROR_MISMATCH, "rank ", config_.peer, " offers end ", theirs_.number, " and ", bytes,
         " bytes from byte ", theirs_.offset, " of ", all, " on, expected an end below ",
         RemotePuts::kGreeting, " and memory that is there");
  }
  puts_.connect(config_.peer, reader.rest());
}

// The lower rank greets, and the other one answers. Each polls until the other's greeting is here,
// so both greetings are sent.
void RemoteEnd::greet() {
  const FirstContact contact(puts_.comm_);
  bool is_said = false;
  const Waited ended = contact.wait(puts_, [&] {
    const bool is_greeted = greeted_.load(std::memory_order_acquire);
    if (!is_said && (is_greeted || puts_.comm_.rank() < config_.peer)) is_said = put_greeting();
    return (is_said && is_greeted && !is_under_way()) || failure() != nullptr;
  });
  puts_.shut();
  if (const RemotePuts::Failure* failed = failure()) {
    if (!contact.is_lost(config_.peer)) {
      contact.fail_data(failed->status, config_.peer, puts_.place_of(config_.peer),
                        failed->text.data());
    }
  } else if (ended == Waited::late) {
    contact.fail_silent(config_.peer, puts_.place_of(config_.peer));
  }
}

bool RemoteEnd::put_greeting() {
  return puts_.put(*this, {.peer = config_.peer,
                           .from = &region_,
                           .to = theirs_.region,
                           .tag = RemotePuts::tag(RemotePuts::kGreeting, number()),
                           .id = number_});
}

bool RemoteEnd::put(std::size_t to, std::size_t from, std::size_t bytes, std::uint32_t counter) {
  return puts_.put(*this, {.peer = config_.peer,
                           .from = &region_,
                           .from_offset = config_.place.offset + from,
                           .to = theirs_.region,
                           .to_offset = theirs_.offset + to,
                           .bytes = bytes,
                           .tag = RemotePuts::tag(number(), counter),
                           .id = number_});
}

}  // namespace xd
