#include "ep/cpu/lockstep.h"

#include "base/error.h"
#include "base/math.h"

namespace xd::ep::cpu {
namespace {

template <class T>
T* as(std::byte* address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

GroupMemory::GroupMemory(const Group& group) {
  const int ranks = group.config().ranks;
  for (int r = 0; r < ranks; ++r) maps_.push_back(GroupMap::make(group.config_of(r)));
  segments_ = group.comm().share(kCreateGroup, map_of(group.rank()).end);
  for (int r = 0; r < ranks; ++r) require_size(segments_[at(r)], map_of(r).end, r);
}

std::vector<Lockstep::Area> Lockstep::turn_areas(const GroupMemory& memory, int ranks) {
  std::vector<Area> areas;
  for (int r = 0; r < ranks; ++r) {
    const turn::TurnMap& map = memory.map_of(r).turn;
    areas.push_back({as<turn::Entry<Record>>(memory.area_of(r, map.entry)),
                     as<turn::DoneFlag>(memory.area_of(r, map.done))});
  }
  return areas;
}

Lockstep::Lockstep(const Group& group)
    : GroupMemory(group),
      HostTurn(group.comm(), group.number(), turn_areas(*this, group.config().ranks)),
      comm_(group.comm()),
      count_layout_{group.config().experts, group.config().ranks} {}

void Lockstep::send_counts(std::span<const std::uint32_t> values) {
  for (const int peer : peers()) {
    std::atomic<std::uint64_t>* words = counts(peer, comm_.rank());
    for (std::size_t i = 0; i < values.size(); ++i) {
      words[i].store(count_word(values[i], epoch()), std::memory_order_relaxed);
    }
  }
  ring_peers();
}

void Lockstep::await_counts(std::span<std::uint32_t> table) {
  const WaitSite site = this->site(XD_PHASE_COUNTS);
  for (const int peer : peers()) {
    const std::atomic<std::uint64_t>* words = counts(comm_.rank(), peer);
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

std::byte* Lockstep::tensor_of(int rank, turn::RemoteAddress address, std::uint64_t bytes,
                               std::uint64_t alignment) const {
  std::byte* const found = turn::find_remote(
      address, bytes, alignment, {area_of(rank, 0), bytes_of(rank)}, [&](std::uint64_t segment) {
        return comm_.heap().range(rank, static_cast<std::uint32_t>(segment));
      });
  if (found != nullptr) return found;
  fail(XD_ERROR_MISMATCH, "rank ", rank, " offers a tensor outside its shared memory");
}

std::atomic<std::uint64_t>* Lockstep::counts(int owner, int source) const {
  auto* words = as<std::atomic<std::uint64_t>>(area_of(owner, map_of(owner).counts));
  return words + turn::cell_of(epoch(), source, comm_.num_ranks()) * count_layout_.size();
}

}  // namespace xd::ep::cpu
