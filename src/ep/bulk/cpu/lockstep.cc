#include "ep/bulk/cpu/lockstep.h"

#include "base/error.h"
#include "base/math.h"
#include "ep/bulk/cpu/remote/relay.h"

namespace xd::ep::cpu {

GroupMemory::GroupMemory(const Group& group) : shared_(group.share_memory()) {
  for (int r = 0; r < group.config().ranks; ++r) {
    maps_.push_back(GroupMap::make(group.config_of(r)));
  }
}

Lockstep::Lockstep(const Group& group)
    : GroupMemory(group),
      HostTurn(group.comm(), group.number(), map_of(group.self()).turn, shared().areas(),
               group.subject()),
      comm_(group.comm()),
      count_layout_{group.config().experts, group.config().ranks} {
  if (group.config().outlives_losses) outlive_losses(map_of(group.self()).views);
}

Lockstep::~Lockstep() = default;

void Lockstep::reach_machines(const Group& group) {
  if (comm_.hosts().all_are_near()) return;
  remote_ = std::make_unique<RemoteSide>(group, *this);
  reach(*remote_);
}

void Lockstep::bring_entry(int source, std::uint64_t epoch, const Record& record) const {
  for (const NearRank r : comm_.hosts().near()) post_entry_of(source, r, epoch, record);
  ring_peers();
}

void Lockstep::bring_counts(int source, std::uint64_t epoch,
                            std::span<const std::uint32_t> values) const {
  for (const NearRank r : comm_.hosts().near()) post_counts(r, source, epoch, values);
  ring_peers();
}

void Lockstep::send_counts(std::span<const std::uint32_t> values) {
  for (const NearRank peer : peers()) post_counts(peer, comm_.rank(), epoch(), values);
  ring_peers();
  if (remote_) remote_->send_counts(values);
}

void Lockstep::post_counts(NearRank owner, int source, std::uint64_t epoch,
                           std::span<const std::uint32_t> values) const {
  std::atomic<std::uint64_t>* words = counts(owner, source, epoch);
  for (std::size_t i = 0; i < values.size(); ++i) {
    words[i].store(count_word(values[i], epoch), std::memory_order_relaxed);
  }
}

void Lockstep::await_counts(std::span<std::uint32_t> table) {
  const HostWait site = this->site(XD_PHASE_COUNTS);
  for (const NearRank peer : peers()) await_counts_of(peer, site, table);
  if (!remote_) return;
  for (const int rank : remote_->ranks()) await_counts_of(rank, site, table);
}

void Lockstep::await_counts_of(int source, const HostWait& site, std::span<std::uint32_t> table) {
  const std::atomic<std::uint64_t>* words = counts(comm_.hosts().self(), source, epoch());
  std::uint32_t* row = table.data() + at(source) * count_layout_.size();
  std::size_t taken = 0;
  const auto take = [&] {
    for (; taken < count_layout_.size(); ++taken) {
      const std::uint64_t word = words[taken].load(std::memory_order_relaxed);
      if (!count_is_of(word, epoch())) return false;
      row[taken] = count_of(word);
    }
    return true;
  };
  const bool came = wait_for(
      source, site, take, [&] { return last_entered(source); }, [&] { return source; });
  // The operation's own error tells of the loss.
  if (!came) fail(XD_ERROR_PEER_LOST, "the counts of rank ", source, " have not come");
}

std::atomic<std::uint64_t>* Lockstep::counts(NearRank owner, int source,
                                             std::uint64_t epoch) const {
  const NearMemory area = area_of(owner, map_of(owner).counts);
  return area.array<std::atomic<std::uint64_t>>() +
         turn::cell_of(epoch, source, comm_.num_ranks()) * count_layout_.size();
}

}  // namespace xd::ep::cpu
