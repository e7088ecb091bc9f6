#include "comm/views/cards.h"

#include <algorithm>
#include <cstring>

namespace xd {

void Cards::publish(const Card& card) {
  seen_[at(hosts_.self())] = card;
  places(hosts_.self()).card.write(card);
  ring_peers();
  if (!hosts_.all_are_near()) send(hosts_.self(), card);
}

void Cards::send(int rank, const Card& card) {
  const SentCard sent{.rank = rank, .card = card};
  mesh_.send_report(std::as_bytes(std::span(&sent, 1)));
}

void Cards::repeat() {
  for (const NearRank rank : hosts_.near()) {
    if (seen_[at(rank)].serial > 0) send(rank, seen_[at(rank)]);
  }
}

const std::vector<Card>& Cards::all() {
  for (const NearRank rank : hosts_.peers()) {
    const auto card = places(rank).card.read();
    if (card && card->serial > seen_[at(rank)].serial) seen_[at(rank)] = *card;
  }
  const std::lock_guard lock(mutex_);
  for (const SentCard& sent : arrived_) {
    Card& seen = seen_[at(static_cast<int>(sent.rank))];
    if (sent.card.serial > seen.serial) seen = sent.card;
  }
  arrived_.clear();
  return seen_;
}

void Cards::take(std::span<const std::byte> report) {
  SentCard sent;
  std::memcpy(static_cast<void*>(&sent), report.data(), sizeof(sent));
  const auto ranks = static_cast<std::int64_t>(seen_.size());
  if (sent.rank < 0 || sent.rank >= ranks || hosts_.is_near(static_cast<int>(sent.rank))) return;
  const std::lock_guard lock(mutex_);
  const auto known = std::ranges::find(arrived_, sent.rank, &SentCard::rank);
  if (known == arrived_.end()) {
    arrived_.push_back(sent);
  } else if (sent.card.serial > known->card.serial) {
    *known = sent;
  }
}

}  // namespace xd
