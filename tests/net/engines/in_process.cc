#include "net/engines/in_process.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/fd.h"
#include "base/math.h"

namespace xd::net {
namespace {

// A rank's part that its peers see, in all threads.
class End {
 public:
  End() : bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!bell_) fail_errno("eventfd", errno);
  }

  std::uint64_t add(std::span<std::byte> memory) {
    const std::lock_guard lock(mutex_);
    regions_[++last_key_] = memory;
    return last_key_;
  }
  void remove(std::uint64_t key) {
    const std::lock_guard lock(mutex_);
    regions_.erase(key);
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    gone_ = true;
  }

  // Copies the bytes and reports the tag, in this order under the lock: who takes the tag sees the
  // bytes. The text of the failure; nullptr if it has arrived.
  const char* receive(const Put& put) {
    const std::lock_guard lock(mutex_);
    if (gone_) return "its engine has been closed";
    const auto region = regions_.find(put.to.key);
    if (region == regions_.end()) return "it has no region with this key";
    if (put.to_offset > region->second.size() || put.bytes > region->second.size() - put.to_offset)
      return "the put reaches beyond the region";
    if (put.bytes > 0) {
      std::memcpy(region->second.data() + put.to_offset,
                  put.from->memory().data() + put.from_offset, put.bytes);
    }
    arrived_.push_back(put.tag);
    ring();
    return nullptr;
  }

  void take(std::vector<std::uint32_t>& arrived) {
    const std::lock_guard lock(mutex_);
    std::uint64_t rings = 0;
    static_cast<void>(::read(bell_.get(), &rings, sizeof(rings)));
    arrived.insert(arrived.end(), arrived_.begin(), arrived_.end());
    arrived_.clear();
  }
  int bell_if_nothing_arrived() {
    const std::lock_guard lock(mutex_);
    return arrived_.empty() ? bell_.get() : -1;
  }

 private:
  void ring() {
    const std::uint64_t one = 1;
    static_cast<void>(::write(bell_.get(), &one, sizeof(one)));
  }

  const UniqueFd bell_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::span<std::byte>> regions_;
  std::uint64_t last_key_ = 0;
  std::vector<std::uint32_t> arrived_;
  bool gone_ = false;
};

using Seats = std::vector<std::shared_ptr<End>>;

class InProcessRegion final : public Region {
 public:
  InProcessRegion(std::shared_ptr<End> end, std::span<std::byte> memory)
      : Region(memory), end_(std::move(end)), key_(end_->add(memory)) {}
  ~InProcessRegion() override { end_->remove(key_); }

  RegionHandle remote() const override {
    return {.base = 0, .key = key_, .bytes = memory().size()};
  }

 private:
  const std::shared_ptr<End> end_;
  const std::uint64_t key_;
};

class InProcess final : public Engine {
 public:
  InProcess(int rank, std::shared_ptr<const Seats> seats)
      : rank_(rank), seats_(std::move(seats)), own_((*seats_)[at(rank)]) {}
  ~InProcess() override { close(); }

  std::size_t max_put() const override { return SIZE_MAX; }

  Bytes address() const override {
    WireWriter writer;
    writer.put(rank_);
    return writer.take();
  }

  void connect(int peer, std::span<const std::byte> address) override {
    WireReader reader(address);
    const auto rank = reader.take<int>();
    if (!reader.at_end() || rank < 0 || at(rank) >= seats_->size())
      fail(XD_ERROR_MISMATCH, "the address of peer ", peer, " is none of this process");
    peers_[peer] = {(*seats_)[at(rank)], false};
  }

  std::unique_ptr<Region> expose(std::span<std::byte> memory) override {
    return std::make_unique<InProcessRegion>(own_, memory);
  }

  bool put(const Put& put) override {
    const auto peer = peers_.find(put.peer);
    XD_CHECK(peer != peers_.end());
    XD_CHECK(put.from_offset <= put.from->memory().size() &&
             put.bytes <= put.from->memory().size() - put.from_offset);
    if (peer->second.failed) return false;
    if (const char* const why = peer->second.end->receive(put)) {
      peer->second.failed = true;
      failed_.push_back({put.peer, why});
    } else {
      sent_.push_back(put.id);
    }
    return true;
  }

  void poll(Events& events) override {
    own_->take(events.arrived);
    events.sent.insert(events.sent.end(), sent_.begin(), sent_.end());
    sent_.clear();
    for (PeerFailure& failure : failed_) events.failed.push_back(std::move(failure));
    failed_.clear();
  }

  int sleep_on() override {
    return sent_.empty() && failed_.empty() ? own_->bell_if_nothing_arrived() : -1;
  }

  void close() noexcept override { own_->leave(); }

 private:
  struct Peer {
    std::shared_ptr<End> end;
    bool failed = false;
  };

  const int rank_;
  const std::shared_ptr<const Seats> seats_;
  const std::shared_ptr<End> own_;
  std::map<int, Peer> peers_;
  std::vector<std::uint64_t> sent_;
  std::vector<PeerFailure> failed_;
};

}  // namespace

std::vector<std::unique_ptr<Engine>> make_in_process_engines(int ranks) {
  const auto seats = std::make_shared<Seats>();
  for (int r = 0; r < ranks; ++r) seats->push_back(std::make_shared<End>());
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < ranks; ++r) engines.push_back(std::make_unique<InProcess>(r, seats));
  return engines;
}

}  // namespace xd::net
