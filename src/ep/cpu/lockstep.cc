#include "ep/cpu/lockstep.h"

#include "base/error.h"
#include "base/math.h"

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
      count_layout_{group.config().experts, group.config().ranks} {}

void Lockstep::send_counts(std::span<const std::uint32_t> values) {
  for (const NearRank peer : peers()) {
    std::atomic<std::uint64_t>* words = counts(peer, comm_.rank());
    for (std::size_t i = 0; i < values.size(); ++i) {
      words[i].store(count_word(values[i], epoch()), std::memory_order_relaxed);
    }
  }
  ring_peers();
}

void Lockstep::await_counts(std::span<std::uint32_t> table) {
  const HostWait site = this->site(XD_PHASE_COUNTS);
  for (const NearRank peer : peers()) {
    const std::atomic<std::uint64_t>* words = counts(comm_.hosts().self(), peer);
    std::uint32_t* row = table.data() + at(peer) * count_layout_.size();
    std::size_t taken = 0;
    const auto take = [&] {
      for (; taken < count_layout_.size(); ++taken) {
        const std::uint64_t word = words[taken].load(std::memory_order_relaxed);
        if (!count_is_of(word, epoch())) return false;
        row[taken] = count_of(word);
      }
      return true;
    };
    comm_.wait_for(peer, site, take, [&] { return last_entered(peer); });
  }
}

std::atomic<std::uint64_t>* Lockstep::counts(NearRank owner, int source) const {
  const NearMemory area = area_of(owner, map_of(owner).counts);
  return area.array<std::atomic<std::uint64_t>>() +
         turn::cell_of(epoch(), source, comm_.num_ranks()) * count_layout_.size();
}

}  // namespace xd::ep::cpu
