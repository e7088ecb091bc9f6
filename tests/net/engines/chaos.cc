#include "net/engines/chaos.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "net/engines/layer.h"

namespace xd::net {

// Bytes of a piece that are neither the sender's any more nor the target's yet.
struct Parcel {
  const void* sender;
  std::uint64_t key;  // of the target's region
  std::size_t offset;
  Bytes bytes;
  bool lost = false;
};

class ChaosWorld {
 public:
  using Acknowledged = std::shared_ptr<std::atomic<bool>>;  // the target has polled since

  // Tags for the pieces of a put, one after another; the first of them.
  std::uint32_t announce(int target, std::uint32_t tag, unsigned pieces, bool swapped,
                         const Acknowledged& acknowledged) {
    const std::lock_guard lock(mutex_);
    const auto flight = std::make_shared<Flight>(
        Flight{.target = target, .tag = tag, .pieces = pieces, .acknowledged = acknowledged});
    if (swapped) swap_with_another(*flight);
    const std::uint32_t first = next_;
    for (unsigned piece = 0; piece < pieces; ++piece) flights_[next_++] = flight;
    return first;
  }

  // The bytes of a piece, for whoever takes it in, which is the target when the time has come.
  void carry(std::uint32_t piece, Parcel parcel) {
    const std::lock_guard lock(mutex_);
    parcels_.emplace(piece, std::move(parcel));
  }
  bool carries(std::uint32_t piece) {
    const std::lock_guard lock(mutex_);
    return parcels_.contains(piece);
  }
  std::optional<Parcel> take(std::uint32_t piece) {
    const std::lock_guard lock(mutex_);
    const auto at = parcels_.find(piece);
    if (at == parcels_.end()) return std::nullopt;
    std::optional<Parcel> parcel = std::move(at->second);
    parcels_.erase(at);
    return parcel;
  }
  void lose_parcels_of(const void* sender) {
    const std::lock_guard lock(mutex_);
    for (auto& [piece, parcel] : parcels_) parcel.lost = parcel.lost || parcel.sender == sender;
  }

  // A put whose tag is to be reported.
  struct Landed {
    std::uint32_t tag;
    Acknowledged acknowledged;
  };
  // A piece has landed. Its put, if that is to be reported now.
  std::optional<Landed> land(std::uint32_t piece, bool first_counts) {
    const std::lock_guard lock(mutex_);
    const auto at = flights_.find(piece);
    XD_CHECK(at != flights_.end());
    const auto flight = at->second;
    flights_.erase(at);
    const bool report = first_counts ? !flight->reported : flight->pieces == 1;
    --flight->pieces;
    if (!report) return std::nullopt;
    flight->reported = true;
    return Landed{flight->tag, flight->acknowledged};
  }

 private:
  struct Flight {
    int target;
    std::uint32_t tag;
    unsigned pieces;  // pieces that have not landed
    Acknowledged acknowledged;
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
  std::map<std::uint32_t, Parcel> parcels_;                   // likewise
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

class Chaos final : public EngineLayer {
 public:
  Chaos(std::unique_ptr<Engine> below, std::shared_ptr<ChaosWorld> world, const ChaosConfig& config)
      : EngineLayer(std::move(below)),
        world_(std::move(world)),
        config_(config),
        random_(config.seed) {}

  std::size_t max_put() const override { return std::min(config_.longest_put, below().max_put()); }
  std::unique_ptr<Region> expose(std::span<std::byte> memory) override {
    auto region = below().expose(memory);
    regions_[region->remote().key] = memory;
    return region;
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
    for (const auto& acknowledged : unacknowledged_) acknowledged->store(true);
    unacknowledged_.clear();
    pieces_.tick([&](const Put& piece) { return below().put(piece); });
    below().poll(from_below_);
    for (const std::uint32_t piece : from_below_.arrived)
      carried_.hold(piece, world_->carries(piece) ? delay() : 0);
    carried_.tick([&](std::uint32_t piece) { return take_in(piece), true; });
    for (const std::uint64_t number : from_below_.sent) {
      Outgoing& put = outgoing_.at(number);
      if (--put.pieces == 0) sent_.hold(number, delay());
    }
    for (PeerFailure& failure : from_below_.failed) failures_.hold(std::move(failure), delay());
    from_below_ = {};
    report(events);
  }

  int sleep_on() override {
    const bool holds = !pieces_.empty() || !carried_.empty() || !arrivals_.empty() ||
                       !sent_.empty() || !failures_.empty() || !repeated_.empty() ||
                       !unacknowledged_.empty();
    return holds && config_.mutant != Mutant::lost_wakeup ? -1 : below().sleep_on();
  }

  void close() noexcept override {
    pieces_.clear();
    if (config_.mutant == Mutant::closing_takes_back) world_->lose_parcels_of(this);
    below().close();
  }

 private:
  struct Outgoing {
    Put put;
    unsigned pieces;  // pieces that have not been sent
    std::uint64_t hash;
    ChaosWorld::Acknowledged acknowledged;
  };

  std::uint64_t number_below(std::uint64_t bound) { return random_() % bound; }
  bool one_in(std::uint64_t count) { return number_below(count) == 0; }
  unsigned delay() {
    return static_cast<unsigned>(number_below(one_in(2) ? 3 : config_.longest_delay + 1));
  }

  void cut(std::uint64_t number, const Put& put) {
    std::set<std::size_t> cuts{0};
    for (std::uint64_t cut = number_below(7); cut > 0 && put.bytes > 0; --cut)
      cuts.insert(number_below(put.bytes));
    cuts.insert(put.bytes);
    const auto pieces = static_cast<unsigned>(std::max<std::size_t>(cuts.size() - 1, 1));
    const bool swapped = config_.mutant == Mutant::swapped_arrivals && one_in(4);
    const bool carried = one_in(2);
    const auto acknowledged = std::make_shared<std::atomic<bool>>(false);
    std::uint32_t tag = world_->announce(put.peer, put.tag, pieces, swapped, acknowledged);
    outgoing_.emplace(number, Outgoing{put, pieces, hash_of(put), acknowledged});
    auto end = cuts.begin();
    for (unsigned piece = 0; piece < pieces; ++piece) {
      const std::size_t begin = *end++;
      Put part = put;
      part.from_offset += begin;
      part.to_offset += begin;
      part.bytes = (end == cuts.end() ? begin : *end) - begin;
      part.tag = tag++;
      part.id = number;
      if (carried) {
        hand_over(part);
      } else {
        pieces_.hold(part, delay());
      }
    }
  }

  // The piece leaves this rank at once, so that it is sent long before it arrives, and arrives
  // though this rank does nothing more.
  void hand_over(Put piece) {
    const std::byte* const begin = piece.from->memory().data() + piece.from_offset;
    world_->carry(piece.tag, {.sender = this,
                              .key = piece.to.key,
                              .offset = piece.to_offset,
                              .bytes = Bytes(begin, begin + piece.bytes)});
    piece.bytes = 0;
    if (!below().put(piece)) pieces_.hold(piece, 0);
  }

  void take_in(std::uint32_t piece) {
    if (auto parcel = world_->take(piece)) {
      if (parcel->lost) return;
      damage(parcel->bytes);
      const std::span<std::byte> region = regions_.at(parcel->key);
      XD_CHECK(parcel->offset <= region.size() &&
               parcel->bytes.size() <= region.size() - parcel->offset);
      std::ranges::copy(parcel->bytes,
                        region.begin() + static_cast<std::ptrdiff_t>(parcel->offset));
    }
    if (const auto put = world_->land(piece, config_.mutant == Mutant::arrival_before_data))
      hold_arrival(*put);
  }

  void damage(Bytes& bytes) {
    if (config_.damaged_in == 0 || bytes.empty() || !one_in(config_.damaged_in)) return;
    bytes[number_below(bytes.size())] ^= std::byte{1} << number_below(8);
  }

  void hold_arrival(const ChaosWorld::Landed& put) {
    unacknowledged_.push_back(put.acknowledged);
    const std::uint32_t tag = put.tag;
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
      if (config_.mutant == Mutant::sent_needs_target && !*outgoing_.at(number).acknowledged)
        return false;
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

  const std::shared_ptr<ChaosWorld> world_;
  const ChaosConfig config_;
  std::mt19937_64 random_;
  std::uint64_t puts_ = 0;
  std::map<std::uint64_t, Outgoing> outgoing_;  // by their numbers
  std::set<int> lost_peers_;
  Events from_below_;
  std::map<std::uint64_t, std::span<std::byte>> regions_;  // by their keys
  std::vector<ChaosWorld::Acknowledged> unacknowledged_;   // puts that the next poll() confirms
  Held<Put> pieces_;
  Held<std::uint32_t> carried_, arrivals_;
  Held<std::uint64_t> sent_, repeated_;
  Held<PeerFailure> failures_;
};

}  // namespace

std::unique_ptr<Engine> make_chaos(std::unique_ptr<Engine> below, std::shared_ptr<ChaosWorld> world,
                                   const ChaosConfig& config) {
  return std::make_unique<Chaos>(std::move(below), std::move(world), config);
}

}  // namespace xd::net
