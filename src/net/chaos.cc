#include "net/chaos.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/hash.h"

namespace xd::net {

class ChaosWorld {
 public:
  // Tags for the pieces of a put, one after another; the first of them.
  std::uint32_t announce(int target, std::uint32_t tag, unsigned pieces, bool swapped) {
    const std::lock_guard lock(mutex_);
    const auto flight = std::make_shared<Flight>(Flight{target, tag, pieces});
    if (swapped) swap_with_another(*flight);
    const std::uint32_t first = next_;
    for (unsigned piece = 0; piece < pieces; ++piece) flights_[next_++] = flight;
    return first;
  }

  // A piece has landed. The tag of its put, if that is to be reported now.
  std::optional<std::uint32_t> land(std::uint32_t piece, bool first_counts) {
    const std::lock_guard lock(mutex_);
    const auto at = flights_.find(piece);
    XD_CHECK(at != flights_.end());
    const auto flight = at->second;
    flights_.erase(at);
    const bool report = first_counts ? !flight->reported : flight->pieces == 1;
    --flight->pieces;
    if (!report) return std::nullopt;
    flight->reported = true;
    return flight->tag;
  }

 private:
  struct Flight {
    int target;
    std::uint32_t tag;
    unsigned pieces;  // that have not landed
    bool reported = false;
  };

  void swap_with_another(Flight& flight) {
    for (auto& [piece, other] : flights_) {
      if (other->target != flight.target) continue;
      std::swap(other->tag, flight.tag);
      return;
    }
  }

  std::mutex mutex_;
  std::map<std::uint32_t, std::shared_ptr<Flight>> flights_;  // by the tags of pieces
  std::uint32_t next_ = 0;
};

std::shared_ptr<ChaosWorld> make_chaos_world() { return std::make_shared<ChaosWorld>(); }

namespace {

// Things that wait for some calls of poll().
template <class Thing>
class Held {
 public:
  void hold(Thing thing, unsigned polls) { held_.push_back({std::move(thing), polls}); }
  bool empty() const { return held_.empty(); }
  void clear() { held_.clear(); }
  // One call of poll(): gives each thing whose time has come to `let_go`, and holds it for one more
  // call where that returns false.
  template <class LetGo>
  void tick(LetGo&& let_go) {
    std::erase_if(held_, [&](Waiting& waiting) {
      if (waiting.polls > 0) --waiting.polls;
      return waiting.polls == 0 && let_go(waiting.thing);
    });
  }

 private:
  struct Waiting {
    Thing thing;
    unsigned polls;
  };
  std::vector<Waiting> held_;
};

std::uint64_t hash_of(const Put& put) {
  return hash_bytes(0, put.from->memory().data() + put.from_offset, put.bytes);
}

class Chaos final : public Engine {
 public:
  Chaos(std::unique_ptr<Engine> below, std::shared_ptr<ChaosWorld> world, const ChaosConfig& config)
      : below_(std::move(below)), world_(std::move(world)), config_(config), random_(config.seed) {}

  std::size_t max_put() const override { return below_->max_put(); }
  Bytes address() const override { return below_->address(); }
  void connect(int peer, std::span<const std::byte> address) override {
    below_->connect(peer, address);
  }
  std::unique_ptr<Room> expose(std::span<std::byte> memory) override {
    return below_->expose(memory);
  }

  bool put(const Put& put) override {
    if (lost_peers_.contains(put.peer) || one_in(8)) return false;
    const std::uint64_t number = puts_++;
    if (number == config_.failed_put) {
      lost_peers_.insert(put.peer);
      if (config_.mutant != Mutant::dropped_error)
        failures_.hold({put.peer, concat("put ", number, " has failed, as chaos wanted")}, delay());
      return true;
    }
    cut(number, put);
    return true;
  }

  void poll(Events& events) override {
    pieces_.tick([&](const Put& piece) { return below_->put(piece); });
    below_->poll(from_below_);
    for (const std::uint32_t piece : from_below_.arrived) {
      if (const auto tag = world_->land(piece, config_.mutant == Mutant::arrival_before_data))
        hold_arrival(*tag);
    }
    for (const std::uint64_t number : from_below_.sent) {
      Outgoing& put = outgoing_.at(number);
      if (--put.pieces == 0) sent_.hold(number, delay());
    }
    for (PeerFailure& failure : from_below_.failed) failures_.hold(std::move(failure), delay());
    from_below_ = {};
    report(events);
  }

  int sleep_on() override {
    const bool holds = !pieces_.empty() || !arrivals_.empty() || !sent_.empty() ||
                       !failures_.empty() || !repeated_.empty();
    return holds && config_.mutant != Mutant::lost_wakeup ? -1 : below_->sleep_on();
  }

  void close() noexcept override {
    pieces_.clear();
    below_->close();
  }

 private:
  struct Outgoing {
    Put put;
    unsigned pieces;  // that have not been sent
    std::uint64_t hash;
  };

  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  bool one_in(std::uint64_t count) { return below(count) == 0; }
  unsigned delay() {
    return static_cast<unsigned>(below(one_in(2) ? 3 : config_.longest_delay + 1));
  }

  void cut(std::uint64_t number, const Put& put) {
    std::set<std::size_t> cuts{0};
    for (std::uint64_t cut = below(7); cut > 0 && put.bytes > 0; --cut)
      cuts.insert(below(put.bytes));
    cuts.insert(put.bytes);
    const auto pieces = static_cast<unsigned>(std::max<std::size_t>(cuts.size() - 1, 1));
    const bool swapped = config_.mutant == Mutant::swapped_arrivals && one_in(4);
    std::uint32_t tag = world_->announce(put.peer, put.tag, pieces, swapped);
    outgoing_.emplace(number, Outgoing{put, pieces, hash_of(put)});
    auto end = cuts.begin();
    for (unsigned piece = 0; piece < pieces; ++piece) {
      const std::size_t begin = *end++;
      Put part = put;
      part.from_offset += begin;
      part.to_offset += begin;
      part.bytes = (end == cuts.end() ? begin : *end) - begin;
      part.tag = tag++;
      part.id = number;
      pieces_.hold(part, delay());
    }
  }

  void hold_arrival(std::uint32_t tag) {
    if (config_.mutant == Mutant::lost_arrival && one_in(16)) return;
    if (config_.mutant == Mutant::repeated_arrival && one_in(8)) arrivals_.hold(tag, delay());
    arrivals_.hold(tag, delay());
  }

  void report(Events& events) {
    arrivals_.tick([&](std::uint32_t tag) {
      events.arrived.push_back(tag);
      return true;
    });
    sent_.tick([&](std::uint64_t number) {
      const auto put = outgoing_.extract(number).mapped();
      if (hash_of(put.put) != put.hash)
        fail(XD_ERROR_INTERNAL, "the source of a put changed before it was sent");
      events.sent.push_back(put.put.id);
      if (config_.mutant == Mutant::repeated_sent && one_in(8)) repeated_.hold(put.put.id, delay());
      return true;
    });
    repeated_.tick([&](std::uint64_t id) {
      events.sent.push_back(id);
      return true;
    });
    failures_.tick([&](PeerFailure& failure) {
      lost_peers_.insert(failure.peer);
      events.failed.push_back(std::move(failure));
      return true;
    });
  }

  const std::unique_ptr<Engine> below_;
  const std::shared_ptr<ChaosWorld> world_;
  const ChaosConfig config_;
  std::mt19937_64 random_;
  std::uint64_t puts_ = 0;
  std::map<std::uint64_t, Outgoing> outgoing_;  // by their numbers
  std::set<int> lost_peers_;
  Events from_below_;
  Held<Put> pieces_;
  Held<std::uint32_t> arrivals_;
  Held<std::uint64_t> sent_, repeated_;
  Held<PeerFailure> failures_;
};

}  // namespace

std::unique_ptr<Engine> make_chaos(std::unique_ptr<Engine> below, std::shared_ptr<ChaosWorld> world,
                                   const ChaosConfig& config) {
  return std::make_unique<Chaos>(std::move(below), std::move(world), config);
}

}  // namespace xd::net
