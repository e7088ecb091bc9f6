// Step 2 of prepare: every count goes to all peers and comes from all of them.
//
//   memory                 written by                     read by
//   counts[slot][s]        s's column threads, into the   this rank's threads, as words that carry
//                          memory of every rank           this epoch; all after grid barrier 2
//   expert_total, _base    the expert's column thread     all blocks, after grid barrier 2
//   GroupState::counts_hash   all blocks (atomics)           the plan's writer, likewise
//
// The first row is group memory. A count and the low half of its epoch are one word, stored and
// loaded whole, so that the word is its own flag and nothing else is read because of it. The
// blocks' counts are trusted after grid barrier 1. Counts may go out before the peers' records are
// here: slot[epoch] is free, since every peer has entered operation epoch - 1 (turn/entry.h). In an
// operation that comes to nothing they are left there, and carry an epoch that no other has.
#pragma once

#include "ep/cuda/prepare_counters.cuh"
#include "ep/cuda/turn.cuh"

namespace xd::ep::cuda {

class Exchange {
 public:
  __device__ Exchange(const PrepareParams& params, const Turn& turn, const Counters& counters)
      : p_(params),
        g_(params.turn.group),
        turn_(turn),
        counters_(counters),
        layout_{g_.experts, g_.ranks()},
        scratch_(PrepareScratch::make(g_.experts, g_.ranks())) {}

  // Adds up this rank's counts over blocks and sends them. All threads of all blocks call it, after
  // grid barrier 1.
  __device__ void send() const;
  // Waits for all ranks' counts. All threads of all blocks call it, when the peers have entered and
  // agree; the functions below hold after grid barrier 2. False after a fatal error.
  __device__ bool receive() const;

  // The counts of a source.
  __device__ std::uint32_t choices(int source, int seat) const {
    return said(source, layout_.expert(seat));
  }
  __device__ std::uint32_t tokens_for(int source, int rank) const {
    return said(source, layout_.rank(rank));
  }
  __device__ std::uint32_t tokens(int source) const { return said(source, layout_.tokens()); }
  __device__ std::uint32_t bad_ids(int source) const { return said(source, layout_.bad_ids()); }

  // Tokens that the sources before `source` have for a rank: in RANK_MAJOR its first row there.
  // Each takes a load.
  __device__ std::uint64_t tokens_before(int source, int rank) const {
    std::uint64_t sum = 0;
#pragma unroll 1
    for (int s = 0; s < source; ++s) sum += tokens_for(s, rank);
    return sum;
  }
  // Choices of an expert by all ranks, and by the ranks before this one.
  __device__ std::uint32_t expert_total(int seat) const {
    return p_.scratch[scratch_.expert_total + seat];
  }
  __device__ std::uint32_t expert_base(int seat) const {
    return p_.scratch[scratch_.expert_base + seat];
  }

 private:
  __device__ std::uint64_t* counts_at(int owner, int source) const {
    return turn_.words(owner, g_.map.counts) +
           turn::cell_of(turn_.epoch(), source, g_.ranks()) * layout_.size();
  }
  __device__ std::uint32_t said(int source, std::size_t index) const {
    return count_of(ptx::ld_relaxed_sys(counts_at(g_.rank(), source) + index));
  }
  // The columns, the bad ids, and the number of tokens.
  __device__ int entries() const { return counters_.column_of_bad_ids() + 2; }
  // The word in which an entry travels; -1 = it does not.
  __device__ int word_of(int entry) const {
    if (entry < g_.experts + g_.ranks()) return entry;
    const int behind = entry - counters_.column_of_bad_ids();
    return behind < 0    ? -1
           : behind == 0 ? static_cast<int>(layout_.bad_ids())
                         : static_cast<int>(layout_.tokens());
  }
  // A thread's entries come in ascending order on every rank, so no wait goes in a circle.
  template <class Body>
  __device__ void for_each_entry(Body&& body) const {
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.x) * threads_per_block() + thread_in_block();
         i < entries(); i += static_cast<int>(gridDim.x) * threads_per_block()) {
      if (!body(i)) return;
    }
  }
  __device__ std::uint32_t sum_column(int column) const;
  __device__ bool receive_word(int word, std::uint64_t& hash) const;
  template <class Body>
  __device__ bool for_each_count(int word, Body&& body) const;
  __device__ bool wait_count(int source, int word, std::uint64_t& count) const;

  const PrepareParams& p_;
  const GroupDevice& g_;
  const Turn& turn_;
  const Counters& counters_;
  const CountLayout layout_;
  const PrepareScratch scratch_;
};

__device__ inline void Exchange::send() const {
  for_each_entry([&](int entry) {
    const bool sums = entry <= counters_.column_of_bad_ids();
    const std::uint32_t value = sums ? sum_column(entry) : static_cast<std::uint32_t>(p_.tokens);
    const int word = word_of(entry);
    if (word < 0) return true;
#pragma unroll 1
    for (int i = 1; i <= g_.ranks(); ++i) {  // this rank comes last
      const int peer = (g_.rank() + i) % g_.ranks();
      ptx::st_relaxed_sys(counts_at(peer, g_.rank()) + word, count_word(value, turn_.epoch()));
    }
    return true;
  });
}

// The sum over all blocks; leaves the sum before each block in counts_before().
__device__ inline std::uint32_t Exchange::sum_column(int column) const {
  constexpr int kAtOnce = 16;
  const int blocks = Choices::blocks();
  std::uint32_t sum = 0;
#pragma unroll 1
  for (int first = 0; first < blocks; first += kAtOnce) {
    std::uint32_t counts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      counts[i] = first + i < blocks ? counters_.counts_of(first + i)[column] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < blocks) counters_.counts_before(first + i)[column] = sum;
      sum += counts[i];
    }
  }
  return sum;
}

__device__ inline bool Exchange::receive() const {
  std::uint64_t hash = 0;
  bool good = true;
  for_each_entry([&](int entry) {
    const int word = word_of(entry);
    good = word < 0 || receive_word(word, hash);
    return good;
  });
  __syncwarp();
  add_of_warp(reinterpret_cast<unsigned long long*>(&g_.control->counts_hash), hash);
  return good;
}

// Waits for one word of every rank, and adds them up where they are an expert's. False after a
// fatal error.
__device__ inline bool Exchange::receive_word(int word, std::uint64_t& hash) const {
  std::uint32_t total = 0, before = 0;
  const bool good = for_each_count(word, [&](int source, std::uint32_t count) {
    hash += hash_entry(static_cast<std::uint64_t>(source) * layout_.size() + word, count);
    if (source < g_.rank()) before += count;
    total += count;
  });
  if (good && word < g_.experts) {
    p_.scratch[scratch_.expert_total + word] = total;
    p_.scratch[scratch_.expert_base + word] = before;
  }
  return good;
}

// Calls body(source, count) for one word of every source's counts, in the sources' order. False
// after a fatal error.
template <class Body>
__device__ bool Exchange::for_each_count(int word, Body&& body) const {
  constexpr int kAtOnce = 8;
#pragma unroll 1
  for (int first = 0; first < g_.ranks(); first += kAtOnce) {
    std::uint64_t count[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int source = min(first + i, g_.ranks() - 1);
      count[i] = ptx::ld_relaxed_sys(counts_at(g_.rank(), source) + word);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int source = first + i;
      if (source >= g_.ranks()) break;
      if (!count_is_of(count[i], turn_.epoch()) && !wait_count(source, word, count[i]))
        return false;
      body(source, count_of(count[i]));
    }
  }
  return true;
}

__device__ inline bool Exchange::wait_count(int source, int word, std::uint64_t& count) const {
  const std::uint64_t* at = counts_at(g_.rank(), source) + word;
  const std::uint64_t epoch = turn_.epoch();
  return device::wait_until(
      g_.comm, turn_.site(XD_PHASE_COUNTS), source,
      [&] {
        count = ptx::ld_relaxed_sys(at);
        return count_is_of(count, epoch);
      },
      [&] { return count_is_of(count, epoch) ? epoch : epoch - 1; });
}

}  // namespace xd::ep::cuda
