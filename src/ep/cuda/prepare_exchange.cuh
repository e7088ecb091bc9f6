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
// blocks' counts are trusted after grid barrier 1.
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

  // Adds up this rank's counts over blocks, sends them and waits for all ranks' counts. All threads
  // of all blocks call it, after grid barrier 1; the functions below hold after grid barrier 2.
  // False after a fatal error.
  __device__ bool run() const;

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
  __device__ std::uint64_t tokens_before(int source, int rank) const {
    std::uint64_t sum = 0;
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
  template <class Body>
  __device__ bool for_each_count(std::size_t index, std::uint32_t own, Body&& body) const;
  __device__ bool wait_count(int source, std::size_t index, std::uint64_t& word) const;
  __device__ std::uint32_t sum_column(int column) const;
  __device__ bool exchange_column(int column, std::uint64_t& hash) const;

  const PrepareParams& p_;
  const GroupDevice& g_;
  const Turn& turn_;
  const Counters& counters_;
  const CountLayout layout_;
  const PrepareScratch scratch_;
};

// A thread's columns come in ascending order on every rank, so no wait goes in a circle.
__device__ inline bool Exchange::run() const {
  std::uint64_t hash = 0;
  bool good = true;
  for (int c = static_cast<int>(blockIdx.x) * threads_per_block() + thread_in_block();
       c <= counters_.column_of_bad_ids() && good;
       c += static_cast<int>(gridDim.x) * threads_per_block()) {
    good = exchange_column(c, hash);
  }
  __syncwarp();
  hash = warp_sum(hash);
  if (lane_id() == 0 && hash != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&g_.control->counts_hash),
              static_cast<unsigned long long>(hash));
  }
  return good;
}

// Sums one column over blocks and, if peers need it, sends it to all of them and awaits theirs.
// False after a fatal error.
__device__ inline bool Exchange::exchange_column(int column, std::uint64_t& hash) const {
  const std::uint32_t sum = sum_column(column);
  const bool is_expert = column < g_.experts;
  const bool is_bad = column == counters_.column_of_bad_ids();
  if (!is_expert && !is_bad && column >= g_.experts + g_.ranks()) return true;
  // Words of a rank: experts, ranks, then tokens and bad ids, which have one column here.
  for (int word = 0; word < (is_bad ? 2 : 1); ++word) {
    const std::size_t index = !is_bad     ? static_cast<std::size_t>(column)
                              : word == 0 ? layout_.tokens()
                                          : layout_.bad_ids();
    const std::uint32_t value = is_bad && word == 0 ? static_cast<std::uint32_t>(p_.tokens) : sum;
    for (int i = 0; i < g_.ranks(); ++i) {
      const int peer = (g_.rank() + 1 + i) % g_.ranks();
      ptx::st_relaxed_sys(counts_at(peer, g_.rank()) + index, count_word(value, turn_.epoch()));
    }
    std::uint32_t total = 0, before = 0;
    const bool good = for_each_count(index, value, [&](int source, std::uint32_t count) {
      hash += hash_entry(static_cast<std::uint64_t>(source) * layout_.size() + index, count);
      if (source < g_.rank()) before += count;
      total += count;
    });
    if (!good) return false;
    if (is_expert) {
      p_.scratch[scratch_.expert_total + column] = total;
      p_.scratch[scratch_.expert_base + column] = before;
    }
  }
  return true;
}

// The sum over all blocks; leaves the sum before each block in counts_before().
__device__ inline std::uint32_t Exchange::sum_column(int column) const {
  constexpr int kAtOnce = 16;
  const int blocks = Choices::blocks();
  std::uint32_t sum = 0;
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

// Calls body(source, count) for one word of every source's counts, in the sources' order. `own` is
// this rank's count, which need not come back from memory. False after a fatal error.
template <class Body>
__device__ bool Exchange::for_each_count(std::size_t index, std::uint32_t own, Body&& body) const {
  constexpr int kAtOnce = 8;
  const std::uint64_t epoch = turn_.epoch();
  for (int first = 0; first < g_.ranks(); first += kAtOnce) {
    std::uint64_t word[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int source = first + i;
      word[i] = source < g_.ranks() && source != g_.rank()
                    ? ptx::ld_relaxed_sys(counts_at(g_.rank(), source) + index)
                    : count_word(own, epoch);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int source = first + i;
      if (source >= g_.ranks()) break;
      if (!count_is_of(word[i], epoch) && !wait_count(source, index, word[i])) return false;
      body(source, count_of(word[i]));
    }
  }
  return true;
}

__device__ inline bool Exchange::wait_count(int source, std::size_t index,
                                            std::uint64_t& word) const {
  const std::uint64_t* at = counts_at(g_.rank(), source) + index;
  const std::uint64_t epoch = turn_.epoch();
  return device::wait_until(
      g_.comm, turn_.site(XD_PHASE_COUNTS), source,
      [&] {
        word = ptx::ld_relaxed_sys(at);
        return count_is_of(word, epoch);
      },
      [&] { return count_is_of(word, epoch) ? epoch : epoch - 1; });
}

}  // namespace xd::ep::cuda
