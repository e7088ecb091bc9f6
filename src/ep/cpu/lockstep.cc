#include "ep/cpu/lockstep.h"

#include <algorithm>

#include "base/error.h"
#include "base/math.h"

namespace xd::ep::cpu {
namespace {

template <class T>
T* as(std::byte* address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

Lockstep::Lockstep(const Group& group)
    : comm_(group.comm()),
      group_(group.number()),
      rank_(group.rank()),
      ranks_(group.config().ranks),
      count_layout_{group.config().experts, group.config().ranks},
      records_(at(group.config().ranks)) {
  for (int r = 0; r < ranks_; ++r) maps_.push_back(GroupMap::make(group.config_of(r)));
  segments_ = comm_.share(Comm::Collective::group, map_of(rank_).end);
  for (int r = 0; r < ranks_; ++r) require_size(segments_[at(r)], map_of(r).end, r);
}

// Peers in the order in which this rank turns to them: the next one first, so that all ranks do not
// turn to the same one at once.
template <class Body>
void Lockstep::for_each_peer(Body&& body) const {
  for (int i = 1; i < ranks_; ++i) body((rank_ + i) % ranks_);
}

void Lockstep::begin(xd_ep_operation operation) {
  operation_ = operation;
  ++epoch_;
}

void Lockstep::enter(const Record& record) {
  records_[at(rank_)] = record;
  for_each_peer([&](int peer) {
    EntryRecord& theirs = entry(peer, rank_, epoch_);
    theirs.record = record;
    // Release: who sees this epoch also sees the record, and staged input rows.
    theirs.epoch.store(epoch_, std::memory_order_release);
  });
  ring_peers();
}

void Lockstep::await() {
  const WaitSite site = this->site(XD_PHASE_ENTRY);
  for_each_peer([&](int peer) {
    const EntryRecord& mine = entry(rank_, peer, epoch_);
    const auto here = [&] { return mine.epoch.load(std::memory_order_acquire) == epoch_; };
    comm_.wait_for(peer, site, here, [&] { return last_entered(peer); });
    records_[at(peer)] = mine.record;
  });
}

void Lockstep::leave() {
  for_each_peer([&](int peer) {
    // Release: who sees this epoch also sees every row written there, and none is read any more.
    done(peer, rank_, epoch_).epoch.store(epoch_, std::memory_order_release);
  });
  ring_peers();
  const WaitSite site = this->site(XD_PHASE_DONE);
  for_each_peer([&](int peer) {
    const auto left_at = [&](std::uint64_t epoch) {
      return done(rank_, peer, epoch).epoch.load(std::memory_order_acquire);
    };
    comm_.wait_for(
        peer, site, [&] { return left_at(epoch_) == epoch_; },
        [&] { return std::max(left_at(epoch_), left_at(epoch_ - 1)); });
  });
}

void Lockstep::send_counts(std::span<const std::uint32_t> values) {
  for_each_peer([&](int peer) {
    std::atomic<std::uint64_t>* words = counts(peer, rank_);
    for (std::size_t i = 0; i < values.size(); ++i) {
      words[i].store(count_word(values[i], epoch_), std::memory_order_relaxed);
    }
  });
  ring_peers();
}

void Lockstep::await_counts(std::span<std::uint32_t> table) {
  const WaitSite site = this->site(XD_PHASE_COUNTS);
  for_each_peer([&](int peer) {
    const std::atomic<std::uint64_t>* words = counts(rank_, peer);
    std::uint32_t* row = table.data() + at(peer) * count_layout_.size();
    std::size_t taken = 0;
    const auto take = [&] {
      for (; taken < count_layout_.size(); ++taken) {
        const std::uint64_t word = words[taken].load(std::memory_order_relaxed);
        if (!count_is_of(word, epoch_)) return false;
        row[taken] = count_of(word);
      }
      return true;
    };
    comm_.wait_for(peer, site, take, [&] { return last_entered(peer); });
  });
}

std::byte* Lockstep::tensor_of(int rank, TensorPlace place, std::uint64_t bytes,
                               std::uint64_t alignment) const {
  const bool aligned = place.offset() % alignment == 0;
  if (aligned && place.base() == TensorPlace::kGroup) {
    const Segment& segment = *segments_[at(rank)];
    if (place.offset() <= segment.bytes() && bytes <= segment.bytes() - place.offset()) {
      return area_of(rank, place.offset());
    }
  } else if (aligned && place.base() >= TensorPlace::kHeap) {
    const Place in_heap{.segment = static_cast<std::uint32_t>(place.base() - TensorPlace::kHeap),
                        .offset = place.offset()};
    std::byte* address = comm_.heap().address(rank, in_heap, bytes);
    if (address != nullptr) return address;
  }
  fail(XD_ERROR_MISMATCH, "rank ", rank, " offers a tensor outside its shared memory");
}

EntryRecord& Lockstep::entry(int owner, int source, std::uint64_t epoch) const {
  auto* records = as<EntryRecord>(area_of(owner, map_of(owner).record));
  return records[epoch % 2 * at(ranks_) + at(source)];
}

DoneFlag& Lockstep::done(int owner, int source, std::uint64_t epoch) const {
  auto* flags = as<DoneFlag>(area_of(owner, map_of(owner).done));
  return flags[epoch % 2 * at(ranks_) + at(source)];
}

// For error texts: the last operation that a peer has entered, of the two that the slots can hold.
std::uint64_t Lockstep::last_entered(int peer) const {
  const auto at_slot = [&](std::uint64_t epoch) {
    return entry(rank_, peer, epoch).epoch.load(std::memory_order_acquire);
  };
  return std::max(at_slot(epoch_), at_slot(epoch_ - 1));
}

std::atomic<std::uint64_t>* Lockstep::counts(int owner, int source) const {
  auto* words = as<std::atomic<std::uint64_t>>(area_of(owner, map_of(owner).counts));
  return words + (epoch_ % 2 * at(ranks_) + at(source)) * count_layout_.size();
}

WaitSite Lockstep::site(xd_phase phase) const {
  return {.phase = phase,
          .group = group_,
          .operation = operation_,
          .epoch = epoch_,
          .deadline = comm_.deadline()};
}

void Lockstep::ring_peers() const {
  for_each_peer([&](int peer) { comm_.ring(peer); });
}

}  // namespace xd::ep::cpu
