// The cards of all ranks (far_decision.h), as this rank has seen them: those of near ranks in
// shared memory, those of remote ones by messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "comm/fatal.h"
#include "comm/hosts.h"
#include "comm/near_memory.h"
#include "comm/views/far_decision.h"
#include "comm/views/places.h"
#include "meet/mesh.h"

namespace xd {

// A card on its way between machines. Ranks pass on those of their machine, as the connection over
// which a rank is heard may have ended with another rank.
struct SentCard {
  std::int64_t rank = 0;
  Card card;
};
static_assert(std::has_unique_object_representations_v<SentCard> && sizeof(SentCard) <= kMaxReport);

class Cards {
 public:
  // All outlive the object. `boards` and `controls`: of the near ranks, by rank.
  Cards(const HostMap& hosts, Mesh& mesh, const std::vector<RankBoard>& boards,
        const std::vector<std::shared_ptr<Segment>>& controls)
      : hosts_(hosts),
        mesh_(mesh),
        boards_(boards),
        controls_(controls),
        seen_(hosts.host_of().size()) {}

  ViewPlaces& places(NearRank rank) const {
    return view_places(controls_.of(rank), static_cast<int>(seen_.size()));
  }
  void ring_peers() const {
    for (const NearRank peer : hosts_.peers()) boards_[at(peer)].bell().ring();
  }

  // Shows this rank's card to all others, and wakes them.
  void publish(const Card& card);
  // Sends all cards of this machine to the others again.
  void repeat();
  // By rank; those of near ranks as they are now.
  const std::vector<Card>& all();

  // The watch thread brings a remote rank's card, from any rank of its machine.
  void take(std::span<const std::byte> report);

 private:
  void send(int rank, const Card& card);

  const HostMap& hosts_;
  Mesh& mesh_;
  const std::vector<RankBoard>& boards_;
  const NearTable controls_;
  std::vector<Card> seen_;  // by rank; of the thread that decides
  std::mutex mutex_;
  std::vector<SentCard> arrived_;  // since all() was last called, the newest of each rank
};

}  // namespace xd
