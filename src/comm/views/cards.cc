#include "comm/views/cards.h"

#include <algorithm>
#include <cstring>

namespace xd {

Cards::Cards(const HostMap& hosts, Mesh& mesh, const std::vector<RankBoard>& boards,
             const std::vector<std::shared_ptr<Segment>>& controls)
    : hosts_(hosts),
      mesh_(mesh),
      boards_(boards),
      controls_(controls),
      seen_(hosts.host_of().size()),
      arrived_(hosts.all_are_near() ? 0 : seen_.size()) {
  for (int r = 0; r < static_cast<int>(seen_.size()); ++r) {
    const bool is_remote = !hosts.find_near(r);
    if (is_remote && mesh.is_rail(r)) lines_.push_back({.rank = r, .shown = {}});
  }
  for (Line& line : lines_) line.shown.resize(seen_.size());
}

void Cards::publish(const Card& card) {
  seen_[at(hosts_.self())] = card;
  places(hosts_.self()).card.write(card);
  ring_peers();
  const std::lock_guard lock(lines_mutex_);
  for (Line& line : lines_) show(line, hosts_.self());
  if (lines_.empty() || !has_loss_.load(std::memory_order_relaxed)) return;
  // This rank's connection to a machine may have ended, and near ranks need not be in the call.
  const CardReceipt ask{.about = CardReceipt::About::pass_on};
  for (const NearRank peer : hosts_.peers()) {
    mesh_.send_report_to(peer, std::as_bytes(std::span(&ask, 1)));
  }
}

void Cards::show(Line& line, NearRank rank) {
  const auto card = places(rank).card.read();
  if (!card || card->serial <= line.shown[at(rank)]) return;
  const SentCard sent{.rank = rank, .card = *card};
  if (line.sent - line.read >= kMostUnread ||
      !mesh_.send_report_to(line.rank, std::as_bytes(std::span(&sent, 1)))) {
    line.holds_back = true;
    return;
  }
  line.shown[at(rank)] = card->serial;
  ++line.sent;
}

void Cards::show_all(Line& line) {
  line.holds_back = false;
  for (const NearRank rank : hosts_.near()) show(line, rank);
  const CardReceipt receipt{.count = line.got};
  if (line.receipted != line.got &&
      mesh_.send_report_to(line.rank, std::as_bytes(std::span(&receipt, 1)))) {
    line.receipted = line.got;
  }
}

void Cards::repeat() {
  const std::lock_guard lock(lines_mutex_);
  for (Line& line : lines_) show_all(line);
}

void Cards::on_lost() {
  has_loss_.store(true, std::memory_order_relaxed);
  const std::lock_guard lock(lines_mutex_);
  for (Line& line : lines_) {
    std::ranges::fill(line.shown, 0);
    show_all(line);
  }
}

Cards::Line* Cards::find_line(int rank) {
  const auto found = std::ranges::find(lines_, rank, &Line::rank);
  return found != lines_.end() ? &*found : nullptr;
}

const std::vector<Card>& Cards::all() {
  for (const NearRank rank : hosts_.peers()) {
    const auto card = places(rank).card.read();
    if (card && card->serial > seen_[at(rank)].serial) seen_[at(rank)] = *card;
  }
  const std::lock_guard lock(mutex_);
  for (std::size_t r = 0; r < arrived_.size(); ++r) {
    if (arrived_[r].serial > seen_[r].serial) seen_[r] = arrived_[r];
  }
  return seen_;
}

void Cards::take_card(int from, std::span<const std::byte> report) {
  SentCard sent;
  std::memcpy(static_cast<void*>(&sent), report.data(), sizeof(sent));
  const auto ranks = static_cast<std::int64_t>(arrived_.size());
  if (sent.rank >= 0 && sent.rank < ranks && !hosts_.is_near(static_cast<int>(sent.rank))) {
    const std::lock_guard lock(mutex_);
    Card& known = arrived_[at(static_cast<int>(sent.rank))];
    if (sent.card.serial > known.serial) known = sent.card;
  }
  const std::lock_guard lock(lines_mutex_);
  Line* line = find_line(from);
  if (line == nullptr) return;  // a relay has passed it on
  const CardReceipt receipt{.count = ++line->got};
  if (mesh_.send_report_to(from, std::as_bytes(std::span(&receipt, 1)))) {
    line->receipted = line->got;
  }
}

void Cards::take_receipt(int from, std::span<const std::byte> report) {
  CardReceipt receipt;
  std::memcpy(static_cast<void*>(&receipt), report.data(), sizeof(receipt));
  const std::lock_guard lock(lines_mutex_);
  if (receipt.about == CardReceipt::About::pass_on && hosts_.is_near(from)) {
    for (Line& line : lines_) show_all(line);
    return;
  }
  Line* line = find_line(from);
  if (line == nullptr || receipt.count > line->sent) return;
  line->read = std::max(line->read, receipt.count);
  if (line->holds_back) show_all(*line);
}

}  // namespace xd
