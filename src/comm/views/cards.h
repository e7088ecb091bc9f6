// The cards of all ranks (far_decision.h), as this rank has seen them: those of near ranks in
// shared memory, those of remote ones by messages.
//
// A card goes to every remote rank that this rank is connected to, once. The other end's watch
// thread says how many it has received, and at most kMostUnread are on their way: a process that
// stands still would look like a silent host if its connection filled up. Of cards that are held
// back only the latest values follow.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "comm/control.h"
#include "comm/fatal.h"
#include "comm/hosts.h"
#include "comm/near_memory.h"
#include "comm/views/far_decision.h"
#include "meet/mesh.h"

namespace xd {

// A card on its way between machines. Ranks pass on those of their machine, as the connection over
// which a rank is heard may have ended with another rank.
struct SentCard {
  std::int64_t rank = 0;
  Card card;
};
static_assert(std::has_unique_object_representations_v<SentCard> && sizeof(SentCard) <= kMaxReport);

// To the other end of a connection: how many of its cards have been received over it. To a near
// rank: there is a card to be passed on.
struct CardReceipt {
  enum class About : std::int64_t { received = -1, pass_on = -2 };
  About about = About::received;
  std::uint64_t count = 0;
};

class Cards {
 public:
  static constexpr std::uint64_t kMostUnread = 16;

  // All outlive the object. `boards` and `controls`: of the near ranks, by rank.
  Cards(const HostMap& hosts, Mesh& mesh, const std::vector<RankBoard>& boards,
        const std::vector<std::shared_ptr<Segment>>& controls);

  ViewPlaces& places(NearRank rank) const {
    return view_places(controls_.of(rank), static_cast<int>(seen_.size()));
  }
  void ring_peers() const {
    for (const NearRank peer : hosts_.peers()) boards_[at(peer)].bell().ring();
  }

  // Shows this rank's card to all others, and wakes them.
  void publish(const Card& card);
  // Sends others those cards of this machine that they have not been sent over this connection.
  void repeat();
  // By rank; those of near ranks as they are now.
  const std::vector<Card>& all();

  // ---- The watch thread ----

  // `from`: the rank that says it.
  void take_card(int from, std::span<const std::byte> report);
  void take_receipt(int from, std::span<const std::byte> report);
  // A rank is lost, and with it what it has not passed on.
  void on_lost();

 private:
  // A connection to a remote rank.
  struct Line {
    int rank;
    std::vector<std::uint64_t> shown;  // by rank: the serial of the near rank's card that was sent
    std::uint64_t sent = 0, read = 0;  // cards; `read` as the other end says
    std::uint64_t got = 0, receipted = 0;
    bool holds_back = false;
  };
  // The caller holds lines_mutex_.
  void show(Line& line, NearRank rank);
  void show_all(Line& line);
  Line* find_line(int rank);

  const HostMap& hosts_;
  Mesh& mesh_;
  const std::vector<RankBoard>& boards_;
  const NearTable controls_;
  std::vector<Card> seen_;  // by rank; of the thread that decides
  std::mutex mutex_;
  std::vector<Card> arrived_;  // by rank, the newest of remote ones
  std::mutex lines_mutex_;
  std::vector<Line> lines_;
  std::atomic<bool> has_loss_{false};
};

}  // namespace xd
