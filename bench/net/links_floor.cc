// Slots as groups of the CPU executor have them towards a gateway.
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

constexpr int kSlots = 2;
constexpr std::size_t kSlotBytes = std::size_t{256} << 10;
constexpr int kPatienceMs = 60000;
constexpr std::size_t kHalf = Board::kWordBytes / 2;

// Says something to the other rank, in one half of the words, and hears what it says.
xd::Bytes exchange(Board& board, int half, const xd::Bytes& mine) {
  const auto place = [&](int rank) {
    return board.words(rank).subspan(static_cast<std::size_t>(half) * kHalf, kHalf);
  };
  const std::uint64_t size = mine.size();
  std::memcpy(place(board.rank()).data(), &size, sizeof(size));
  std::memcpy(place(board.rank()).data() + sizeof(size), mine.data(), mine.size());
  board.barrier();
  std::uint64_t theirs = 0;
  const auto from = place(other_rank(board));
  std::memcpy(&theirs, from.data(), sizeof(theirs));
  const auto begin = from.begin() + sizeof(theirs);
  return {begin, begin + static_cast<std::ptrdiff_t>(theirs)};
}

// Smallest messages have an engine of their own, as links keep all that an engine reports.
class LinksFloor final : public Floor {
 public:
  LinksFloor(Board& board, const FloorConfig& config)
      : board_(board),
        config_(config),
        chunks_(open(config)),
        pings_(open(config)),
        links_(*chunks_, {.rank = board.rank(), .slots = kSlots, .slot_bytes = kSlotBytes},
               {{other_rank(board), config.peer}}),
        room_(pings_->expose(place_)) {
    links_.accept(0, exchange(board, 0, links_.offer(0)));
    xd::WireWriter writer;
    writer.put(room_->remote());
    writer.put_bytes(pings_->address());
    const xd::Bytes theirs = exchange(board, 1, writer.take());
    xd::WireReader reader(theirs);
    there_ = reader.take<xd::net::RemoteRoom>();
    pings_->connect(other_rank(board), reader.rest());
    board.barrier();
  }
  ~LinksFloor() override {
    board_.barrier();
    pings_->close();
  }

  void stream() override {
    std::size_t left = config_.bytes, expected = config_.coming;
    const auto deadline = xd::Deadline::after_ms(kPatienceMs);
    links_.wait_for(deadline, -1, "all bytes", [&] {
      while (left > 0) {
        const auto slot = links_.take(0);
        if (!slot) break;
        const std::size_t bytes = std::min(left, kSlotBytes);
        links_.send(*slot, bytes);
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
    const bool begins = board_.rank() < other_rank(board_);
    for (int turn = 0; turn < turns; ++turn) {
      if (begins) say();
      hear();
      if (!begins) say();
    }
  }

 private:
  static std::unique_ptr<xd::net::Engine> open(const FloorConfig& config) {
    const auto library = xd::net::load_fabric();
    const auto providers = xd::net::fabric_providers(*library, config.address);
    const std::vector<std::string> all[] = {providers};
    return xd::net::open_fabric(library, xd::net::agree_on_provider(all), config.address);
  }
  void say() {
    const xd::net::Put put{.peer = other_rank(board_), .from = room_.get(), .to = there_, .tag = 1};
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
        xd::fail(XD_ERROR_TIMEOUT, "no ping of rank ", other_rank(board_));
    }
  }

  Board& board_;
  const FloorConfig config_;
  const std::unique_ptr<xd::net::Engine> chunks_, pings_;
  xd::net::Links links_;
  std::vector<std::byte> place_ = std::vector<std::byte>(64);
  const std::unique_ptr<xd::net::Room> room_;
  xd::net::RemoteRoom there_;
  xd::net::Events events_;
};

}  // namespace

std::unique_ptr<Floor> make_links_floor(Board& board, const FloorConfig& config) {
  return std::make_unique<LinksFloor>(board, config);
}

}  // namespace bench::net
