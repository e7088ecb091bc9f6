#include "net/proxy.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <set>

#include "base/math.h"
#include "base/thread.h"

namespace xd::net {
namespace {

// After its last work the proxy looks all the time, then often, then seldom, then rarely. While it
// sleeps, what comes over the network wakes it, if the engine has a descriptor; kernels ring no
// bell, so the first chunk of a kernel after a pause may wait for as long as the proxy sleeps.
constexpr std::chrono::microseconds kSpin{500}, kOften{50}, kSeldom{1000}, kRarely{5000};
constexpr std::chrono::milliseconds kLively{20}, kPause{1000};

std::uint64_t seen(std::uint64_t& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}
void tell(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

}  // namespace

// Its handler runs before those of libraries that were loaded earlier, as the links' engine was.
class ProxiesOfProcess {
 public:
  static ProxiesOfProcess& instance() {
    static auto* const all = new ProxiesOfProcess;  // is used while static objects go
    return *all;
  }
  void add(Proxy* proxy) {
    const std::lock_guard lock(mutex_);
    if (process_ != ::getpid()) {
      living_.clear();  // of the process that this one was forked from
      std::atexit([] { instance().end_all(); });
    }
    process_ = ::getpid();
    living_.insert(proxy);
  }
  void remove(Proxy* proxy) {
    const std::lock_guard lock(mutex_);
    living_.erase(proxy);
  }

 private:
  void end_all() {
    if (process_ != ::getpid()) return;  // in a fork there are no such threads
    const std::lock_guard lock(mutex_);
    for (Proxy* proxy : living_) proxy->ask_to_end();
    for (Proxy* proxy : living_) proxy->await_end();
  }

  std::mutex mutex_;
  pid_t process_ = -1;
  std::set<Proxy*> living_;
};

Courier::Courier(Links& links, const FrameWords& words)
    : links_(links),
      words_(words),
      frames_(links.map().frames),
      outgoing_(links.map().num_frames()),
      incoming_(links.map().num_frames()) {}

bool Courier::step() {
  bool news = false;
  for (std::size_t s = 0; s < outgoing_.size(); ++s) {
    news |= send(s);
    news |= give_back(s);
  }
  news |= links_.poll();
  for (std::size_t p = 0; p < links_.map().neighbours; ++p) news |= take_in(static_cast<int>(p));
  for (std::size_t s = 0; s < outgoing_.size(); ++s) news |= free(s);
  return news;
}

bool Courier::at_rest() const {
  for (std::size_t s = 0; s < outgoing_.size(); ++s) {
    if (use_of(seen(words_.filled[s])) != outgoing_[s].use) return false;
    if (incoming_[s].chunk && has_read(s)) return false;
  }
  return links_.at_rest();
}

bool Courier::send(std::size_t frame) {
  Outgoing& mine = outgoing_[frame];
  const std::uint64_t word = seen(words_.filled[frame]);
  if (use_of(word) == mine.use) return false;
  const int place = static_cast<int>(place_of(frame));
  const auto taken = links_.take(neighbour_of(frame), {.first = place, .end = place + 1});
  if (!taken || use_of(word) != mine.use + 1 || bytes_of(word) > taken->bytes.size()) {
    fail(XD_ERROR_INTERNAL, "a kernel sends ", bytes_of(word), " bytes by use ", use_of(word),
         " of frame ", place, " to neighbour ", neighbour_of(frame), ", expected at most ",
         links_.map().frame_bytes, " bytes by use ", mine.use + 1,
         taken ? "" : ", and not before it is free");
  }
  links_.send(*taken, bytes_of(word));
  mine = {.use = use_of(word), .under_way = true};
  return true;
}

bool Courier::free(std::size_t frame) {
  Outgoing& mine = outgoing_[frame];
  if (!mine.under_way || !links_.is_free(neighbour_of(frame), place_of(frame))) return false;
  mine.under_way = false;
  tell(words_.freed[frame], frame_word(mine.use, 0));
  return true;
}

bool Courier::take_in(int neighbour) {
  bool news = false;
  while (const auto chunk = links_.next(neighbour)) {
    const std::size_t frame = at(neighbour) * frames_ + chunk->frame;
    Incoming& mine = incoming_[frame];
    ++mine.use;
    mine.chunk = chunk;
    tell(words_.landed[frame],
         frame_word(mine.use, static_cast<std::uint32_t>(chunk->bytes.size())));
    news = true;
  }
  return news;
}

// Uses wrap.
bool Courier::has_read(std::size_t frame) const {
  return static_cast<std::int32_t>(use_of(seen(words_.read[frame])) - incoming_[frame].use) >= 0;
}

bool Courier::give_back(std::size_t frame) {
  Incoming& mine = incoming_[frame];
  if (!mine.chunk || !has_read(frame)) return false;
  links_.give_back(*mine.chunk);
  mine.chunk.reset();
  return true;
}

Proxy::Proxy(Links& links, const FrameWords& words, Calls calls)
    : links_(links),
      courier_(links, words),
      calls_(std::move(calls)),
      thread_(start_thread("xd-proxy", [this] { run(); })) {
  try {
    ProxiesOfProcess::instance().add(this);
  } catch (...) {
    ask_to_end();
    await_end();
    throw;
  }
}

Proxy::~Proxy() {
  ProxiesOfProcess::instance().remove(this);
  ask_to_end();
  await_end();
}

void Proxy::await_end() {
  if (thread_.joinable()) thread_.join();
}

void Proxy::run() noexcept {
  try {
    try {
      work();
    } catch (const Error& error) {
      calls_.failed(error);
    } catch (...) {
      std::array<char, 512> text;
      const Caught error = caught(text);
      calls_.failed(Error(error.status, error_text(text.data()), -1, error.error_number));
    }
  } catch (...) {  // there is no memory for words: kernels wait until their deadlines
  }
}

void Proxy::work() {
  Clock::time_point last_work = Clock::now();
  Clock::time_point end = Clock::time_point::max();
  for (;;) {
    const bool ends = ends_.load(std::memory_order_acquire);  // before the look at the words
    const bool worked = courier_.step();
    const Clock::time_point now = Clock::now();
    if (worked) {
      last_work = now;
      calls_.sent(links_.sent());
    }
    if (ends && end == Clock::time_point::max()) end = now + std::chrono::milliseconds(kPatienceMs);
    if (ends && (courier_.at_rest() || calls_.is_over() || now >= end)) return;
    if (!worked) sleep(now - last_work);
  }
}

void Proxy::sleep(Clock::duration idle) {
  if (idle < kSpin) {
    std::this_thread::yield();
    return;
  }
  auto nap = idle < kLively ? kOften : idle < kPause ? kSeldom : kRarely;
  pollfd one{.fd = links_.sleep_on(), .events = POLLIN, .revents = 0};
  if (one.fd < 0) nap = std::min(nap, kOften);  // something may be here already, or comes unheard
  const timespec limit{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(nap).count()};
  ::ppoll(&one, one.fd >= 0 ? 1 : 0, &limit, nullptr);
}

}  // namespace xd::net
