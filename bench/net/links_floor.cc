// Frames as groups of the CPU executor have them towards a relay.
#include <cstring>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/wire.h"
#include "net/fabric/fabric.h"
#include "net/floor.h"
#include "net/links.h"

namespace bench::net {
namespace {

constexpr int kFrames = 2;
constexpr std::size_t kFrameBytes = std::size_t{256} << 10;
constexpr int kPatienceMs = 60000;
constexpr std::size_t kHalf = RankResults::kWordBytes / 2;

// Says something to the other rank, in one half of the words, and hears what it says.
xd::Bytes exchange(RankResults& rank_results, int half, const xd::Bytes& mine) {
  const auto place = [&](int rank) {
    return rank_results.words(rank).subspan(static_cast<std::size_t>(half) * kHalf, kHalf);
  };
  const std::uint64_t size = mine.size();
  std::memcpy(place(rank_results.rank()).data(), &size, sizeof(size));
  std::memcpy(place(rank_results.rank()).data() + sizeof(size), mine.data(), mine.size());
  rank_results.barrier();
  std::uint64_t theirs = 0;
  const auto from = place(other_rank(rank_results));
  std::memcpy(&theirs, from.data(), sizeof(theirs));
  const auto begin = from.begin() + sizeof(theirs);
  return {begin, begin + static_cast<std::ptrdiff_t>(theirs)};
}

// Smallest messages have an engine of their own, as links keep all that an engine reports.
class LinksFloor final : public Floor {
 public:
  LinksFloor(RankResults& rank_results, const FloorConfig& config)
      : rank_results_(rank_results),
        config_(config),
        chunks_(open(config)),
        pings_(open(config)),
        links_(*chunks_,
               {.rank = rank_results.rank(), .frames = kFrames, .frame_bytes = kFrameBytes},
               {{other_rank(rank_results), config.peer}}),
        region_(pings_->expose(place_)) {
    links_.accept(0, exchange(rank_results, 0, links_.offer(0)));
    xd::WireWriter writer;
    writer.put(region_->remote());
    writer.put_bytes(pings_->address());
    const xd::Bytes theirs = exchange(rank_results, 1, writer.take());
    xd::WireReader reader(theirs);
    there_ = reader.take<xd::net::RegionHandle>();
    pings_->connect(other_rank(rank_results), reader.rest());
    rank_results.barrier();
  }
  ~LinksFloor() override {
    rank_results_.barrier();
    pings_->close();
  }

  void stream() override {
    std::size_t left = config_.bytes, expected = config_.coming;
    const auto deadline = xd::Deadline::after_ms(kPatienceMs);
    links_.wait_for(deadline, -1, "all bytes", [&] {
      while (left > 0) {
        const auto frame = links_.take(0);
        if (!frame) break;
        const std::size_t bytes = std::min(left, kFrameBytes);
        links_.send(*frame, bytes);
        left -= bytes;
      }
      while (const auto chunk = links_.next(0)) {
        expected -= chunk->bytes.size();
        links_.give_back(*chunk);
      }
      return left == 0 && expected == 0 && links_.at_rest();
    });
  }

  void ping(int turns) override {
    const bool begins = rank_results_.rank() < other_rank(rank_results_);
    for (int turn = 0; turn < turns; ++turn) {
      if (begins) say();
      hear();
      if (!begins) say();
    }
  }

 private:
  static std::unique_ptr<xd::net::Engine> open(const FloorConfig& config) {
    const auto library = xd::net::load_fabric();
    const auto adapters =
        xd::net::fabric_adapters(*library, config.address, xd::net::Where::at_address);
    if (adapters.empty()) xd::fail(XD_ERROR_UNSUPPORTED, "no provider for ", config.address);
    return xd::net::open_fabric(library, adapters.front());
  }
  void say() {
    const xd::net::Put put{
        .peer = other_rank(rank_results_), .from = region_.get(), .to = there_, .tag = 1};
    wait([&] { return pings_->put(put); });
  }
  void hear() {
    wait([&] { return !events_.arrived.empty(); });
    events_.arrived.erase(events_.arrived.begin());
  }
  template <class Ready>
  void wait(Ready&& ready) {
    const auto deadline = xd::Deadline::after_ms(kPatienceMs);
    while (!ready()) {
      pings_->poll(events_);
      events_.sent.clear();
      if (deadline.passed() || !events_.failed.empty())
        xd::fail(XD_ERROR_TIMEOUT, "no ping of rank ", other_rank(rank_results_));
    }
  }

  RankResults& rank_results_;
  const FloorConfig config_;
  const std::unique_ptr<xd::net::Engine> chunks_, pings_;
  xd::net::Links links_;
  std::vector<std::byte> place_ = std::vector<std::byte>(64);
  const std::unique_ptr<xd::net::Region> region_;
  xd::net::RegionHandle there_;
  xd::net::Events events_;
};

}  // namespace

std::unique_ptr<Floor> make_links_floor(RankResults& rank_results, const FloorConfig& config) {
  return std::make_unique<LinksFloor>(rank_results, config);
}

}  // namespace bench::net
