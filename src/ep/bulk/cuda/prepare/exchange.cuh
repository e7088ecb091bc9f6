// Step 2 of prepare: every count goes to all peers and comes from all of them.
//
//   memory                 written by                     read by
//   counts[stage][s]       s's last block at the grid     all blocks of this rank, as words that
//                          barrier, into the memory of    carry this epoch
//                          every rank
//   Shared, totals, bases  this block, in receive()       this block, after its next barrier
//
// The first row is group memory. A count and the low half of its epoch are one word, stored and
// loaded whole, so that the word is its own flag and nothing else is read because of it. The
// blocks' counts are trusted after grid barrier 1. Counts may go out before the peers' records are
// here: stage[epoch] is free, since every peer has entered operation epoch - 1 (turn/entry.h). In
// an operation that comes to nothing they are left there, and carry an epoch that no other has.
//
// Every block waits for all words of all ranks, its own rank's as well, and keeps what it needs in
// shared memory: so no block waits for another one of its launch behind the first grid barrier.
#pragma once

#include "ep/bulk/cuda/prepare/counters.cuh"
#include "ep/bulk/cuda/turn.cuh"

namespace xd::ep::cuda {

class Exchange {
 public:
  struct Shared {
    std::uint64_t hash[kMostPrepareWarps];  // the head block: of the counts that each warp has seen
    unsigned long long bad_ids;             // of all ranks
    int bad_id_rank;                        // the lowest that has some; INT32_MAX = none
  };

  // Takes the shared memory behind the counters.
  __device__ Exchange(const PrepareParams& params, const Turn& turn, const Counters& counters,
                      Shared& shared)
      : p_(params),
        g_(params.turn.group),
        turn_(turn),
        counters_(counters),
        layout_{g_.experts, g_.ranks()},
        s_(shared),
        total_(counters.end()),
        base_(total_ + g_.experts + g_.ranks()) {}

  __device__ std::uint32_t* end() const { return base_ + g_.experts + g_.ranks(); }

  // All threads call it, before grid barrier 1.
  __device__ void clear() const;
  // Adds up this rank's counts over blocks and sends them. All threads of one block call it, behind
  // the arrival of all blocks at grid barrier 1.
  __device__ void send() const;
  // Waits for all ranks' counts. All threads of all blocks call it, when the peers have entered and
  // agree; the functions below hold after the block's next barrier. False after a fatal error.
  __device__ bool receive() const;

  // The counts of a source.
  __device__ std::uint32_t choices(int source, int physical_expert) const {
    return said(source, layout_.expert(physical_expert));
  }
  __device__ std::uint32_t tokens_for(int source, int rank) const {
    return said(source, layout_.rank(rank));
  }
  __device__ std::uint32_t tokens(int source) const { return said(source, layout_.tokens()); }

  // Tokens that the sources before `source` have for a rank: in RANK_MAJOR its first row there.
  // Each takes a load.
  __device__ std::uint64_t tokens_before(int source, int rank) const {
    std::uint64_t sum = 0;
#pragma unroll 1
    for (int s = 0; s < source; ++s) sum += tokens_for(s, rank);
    return sum;
  }
  // Choices of an expert by all ranks, and by the ranks before this one.
  __device__ std::uint32_t expert_total(int physical_expert) const {
    return total_[physical_expert];
  }
  __device__ std::uint32_t expert_base(int physical_expert) const { return base_[physical_expert]; }
  // Likewise tokens that have rows at a rank.
  __device__ std::uint32_t rank_total(int rank) const { return total_[g_.experts + rank]; }
  __device__ std::uint32_t rank_base(int rank) const { return base_[g_.experts + rank]; }
  // A hash of all counts, in the head block.
  __device__ std::uint64_t hash() const { return sum_over_warps(s_.hash); }
  // Bad ids of all ranks, and the lowest rank that has some; INT32_MAX = none.
  __device__ std::uint64_t all_bad_ids() const { return s_.bad_ids; }
  __device__ int bad_id_rank() const { return s_.bad_id_rank; }

 private:
  __device__ std::uint64_t* counts_at(int owner, int source) const {
    return turn_.words(owner, g_.map.counts) +
           turn::cell_of(turn_.epoch(), source, g_.ranks()) * layout_.size();
  }
  __device__ std::uint32_t said(int source, std::size_t index) const {
    return count_of(ptx::ld_relaxed_sys(counts_at(g_.rank(), source) + index));
  }
  template <class Body>
  __device__ void for_each_word(Body&& body) const {
#pragma unroll 1
    for (int i = thread_in_block(); i < static_cast<int>(layout_.size());
         i += threads_per_block()) {
      if (!body(i)) return;
    }
  }
  __device__ std::uint32_t own_count(int word) const;
  __device__ bool receive_word(int word, std::uint64_t& hash) const;
  template <class Body>
  __device__ bool for_each_count(int word, Body&& body) const;
  __device__ bool wait_count(int source, int word, std::uint64_t& count) const;

  const PrepareParams& p_;
  const GroupDevice& g_;
  const Turn& turn_;
  const Counters& counters_;
  const CountLayout layout_;
  Shared& s_;
  std::uint32_t* total_;  // [E + W] sums over all sources, by word
  std::uint32_t* base_;   // [E + W] sums over the sources before this rank
};

__device__ inline void Exchange::clear() const {
  if (thread_in_block() != 0) return;
  s_.bad_ids = 0;
  s_.bad_id_rank = INT32_MAX;
}

__device__ inline void Exchange::send() const {
  for_each_word([&](int word) {
    const std::uint64_t value = count_word(own_count(word), turn_.epoch());
#pragma unroll 1
    for (int i = 1; i <= g_.ranks(); ++i) {  // this rank comes last
      const int peer = (g_.rank() + i) % g_.ranks();
      ptx::st_relaxed_sys(counts_at(peer, g_.rank()) + word, value);
    }
    return true;
  });
}

// This rank's count that travels in a word.
__device__ inline std::uint32_t Exchange::own_count(int word) const {
  if (word == static_cast<int>(layout_.tokens())) return static_cast<std::uint32_t>(p_.tokens);
  const bool of_ids = word == static_cast<int>(layout_.bad_ids());
  return counters_.sum_of(counters_.counts_of(0), of_ids ? counters_.column_of_bad_ids() : word,
                          Choices::blocks());
}

__device__ inline bool Exchange::receive() const {
  std::uint64_t hash = 0;
  bool good = true;
  for_each_word([&](int word) {
    good = receive_word(word, hash);
    return good;
  });
  __syncwarp();
  if (Choices::is_head()) keep_sum_of_warp(s_.hash, hash);
  return good;
}

// Waits for one word of every rank, and adds them up; the head block hashes them too. False after a
// fatal error.
__device__ inline bool Exchange::receive_word(int word, std::uint64_t& hash) const {
  const bool of_ids = word == static_cast<int>(layout_.bad_ids());
  std::uint64_t total = 0;
  std::uint32_t before = 0;
  const bool good = for_each_count(word, [&](int source, std::uint32_t count) {
    if (Choices::is_head()) {
      hash += hash_entry(static_cast<std::uint64_t>(source) * layout_.size() + word, count);
    }
    if (of_ids && count != 0) s_.bad_id_rank = min(s_.bad_id_rank, source);
    if (source < g_.rank()) before += count;
    total += count;
  });
  if (word < g_.experts + g_.ranks()) {
    total_[word] = static_cast<std::uint32_t>(total);
    base_[word] = before;
  }
  if (of_ids) s_.bad_ids = total;
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
