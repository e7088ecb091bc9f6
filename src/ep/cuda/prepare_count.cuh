// Steps 1 to 3 of prepare: counting, exchanging counts, placing. Included by prepare_parts.cuh.
#pragma once

namespace xd::ep::cuda {

// The choices of the warp's tokens, as many tokens at a time as the lanes hold: body(choice). The
// next ids are fetched meanwhile.
template <class Body>
__device__ void Prepare::for_each_step(Body&& body) const {
  const int warps = counting_blocks() * warps_per_block();
  const int each = (p_.tokens + warps - 1) / warps;
  const int warp = static_cast<int>(blockIdx.x) * warps_per_block() + warp_in_block();
  if (warp >= warps) return;
  const std::int64_t begin = std::int64_t{warp} * each;
  const std::int64_t end = min(begin + each, std::int64_t{p_.tokens});
  const int step = 32 / p_.topk;
  const int of_step = lane_id() / p_.topk;
  std::int64_t next = of_step < step ? id_at(begin + of_step, end) : -1;
  for (std::int64_t t = begin; t < end; t += step) {
    const std::int64_t id = next;
    if (of_step < step) next = id_at(t + step + of_step, end);
    body(pick(t + of_step, of_step < step && t + of_step < end, id));
  }
}

// What this lane's choice of a token names; -1 from `end` on.
__device__ inline std::int64_t Prepare::id_at(std::int64_t token, std::int64_t end) const {
  if (token >= end) return -1;
  const std::int64_t at = token * p_.topk + lane_id() % p_.topk;
  return p_.wide_ids ? static_cast<const std::int64_t*>(p_.topk_idx)[at]
                     : static_cast<const std::int32_t*>(p_.topk_idx)[at];
}

// A choice counts if its id is an expert's and this row has not named that expert before. Others
// are bad, but for those of a group that collapses duplicates.
__device__ inline Prepare::Pick Prepare::pick(std::int64_t token, bool active,
                                              std::int64_t id) const {
  const int of_step = lane_id() / p_.topk;
  Pick c{active, false, false, static_cast<int>(token), of_step * p_.topk, -1, -1};
  const bool inside = id >= 0 && id < g_.experts;
  const unsigned key = inside ? static_cast<unsigned>(of_step) << 16 | static_cast<unsigned>(id)
                              : 0x80000000u | lane_id();
  const unsigned same = __match_any_sync(kAllLanes, key);
  const bool repeated = inside && (same & ((1u << lane_id()) - 1)) != 0;
  c.good = inside && !repeated;
  c.bad = active && id != -1 && !c.good && !(repeated && g_.collapse);
  if (c.good) {
    c.id = static_cast<int>(id);
    c.rank = c.id / g_.local_experts;
  }
  return c;
}

__device__ inline void Prepare::count_choices() {
  if (blockIdx.x == 0 && threadIdx.x < sizeof(PlanHeader) / sizeof(std::uint64_t)) {
    // Whatever plan these bytes were, they are none from now on.
    reinterpret_cast<std::uint64_t*>(p_.plan)[threadIdx.x] = 0;
  }
  for (int i = thread(); i < warps_per_block() * columns_; i += threads()) counters_[i] = 0;
  if (threadIdx.x == 0) s_.bad = 0;
  if (blockIdx.x == 0) {
    for (int e = thread(); e < g_.experts; e += threads()) {
      p_.scratch[scratch_.kept + e] = 0;
    }
  }
  __syncthreads();
  for_each_step([&](const Pick& c) {
    const unsigned key =
        c.good ? static_cast<unsigned>(c.first_lane) << 16 | c.rank : 0x80000000u | lane_id();
    const unsigned same = __match_any_sync(kAllLanes, key);
    if (c.good) {
      atomicAdd(&mine()[c.id], 1u);
      atomicAdd(&mine()[column_of_rows(c.rank)], 1u);
      if ((same & ((1u << lane_id()) - 1)) == 0) atomicAdd(&mine()[column_of_tokens(c.rank)], 1u);
    }
    const unsigned bad = __ballot_sync(kAllLanes, c.bad);
    if (lane_id() == 0 && bad != 0) atomicAdd(&s_.bad, static_cast<unsigned>(__popc(bad)));
  });
  sum_block(true);
}

// The block's counts, for the others. Without `experts`: of the columns behind theirs alone.
__device__ inline void Prepare::sum_block(bool experts) {
  __syncthreads();
  std::uint32_t* to = block_counts(static_cast<int>(blockIdx.x));
  for (int c = thread() + (experts ? 0 : g_.experts); c < columns_; c += threads()) {
    std::uint32_t sum = 0;
    for (int w = 0; w < warps_per_block(); ++w) sum += counter(w)[c];
    to[c] = sum;
  }
  if (experts && threadIdx.x == 0) to[columns_] = s_.bad;
}

// One word of every source's counts: body(source, count), in their order. `own` is this rank's,
// which need not come back from memory. False = fatal.
template <class Body>
__device__ bool Prepare::for_each_count(std::size_t index, std::uint32_t own, Body&& body) const {
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

__device__ inline bool Prepare::wait_count(int source, std::size_t index,
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

// Sums over blocks, before each of them and of all.
__device__ inline std::uint32_t Prepare::sum_column(int column) const {
  constexpr int kAtOnce = 16;
  const int blocks = counting_blocks();
  std::uint32_t sum = 0;
  for (int first = 0; first < blocks; first += kAtOnce) {
    std::uint32_t counts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      counts[i] = first + i < blocks ? block_counts(first + i)[column] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < blocks) block_base(first + i)[column] = sum;
      sum += counts[i];
    }
  }
  return sum;
}

// One column: its sums over blocks; if peers need it, to and from all of them. False = fatal.
__device__ inline bool Prepare::exchange_column(int column, std::uint64_t& hash) {
  const std::uint32_t sum = sum_column(column);
  const bool is_expert = column < g_.experts;
  const bool is_bad = column == columns_;
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

__device__ inline bool Prepare::exchange_counts() {
  std::uint64_t hash = 0;
  bool good = true;
  for (int c = static_cast<int>(blockIdx.x) * threads() + thread(); c <= columns_ && good;
       c += static_cast<int>(gridDim.x) * threads()) {
    good = exchange_column(c, hash);
  }
  __syncwarp();
  for (int step = 16; step > 0; step /= 2) hash += __shfl_xor_sync(kAllLanes, hash, step);
  if (lane_id() == 0 && hash != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&g_.control->counts_hash),
              static_cast<unsigned long long>(hash));
  }
  return good;
}

// Exclusive prefix sums of value(0 .. count - 1): store(i, sum before i), also for i = count. All
// threads.
template <class Value, class Store>
__device__ void Prepare::scan(int count, Value&& value, Store&& store) {
  const int each = (count + threads() - 1) / threads();
  const int begin = min(thread() * each, count), end = min(begin + each, count);
  std::uint64_t own = 0;
  for (int i = begin; i < end; ++i) own += value(i);
  std::uint64_t before = own;
  for (int step = 1; step < 32; step *= 2) {
    const std::uint64_t other = __shfl_up_sync(kAllLanes, before, step);
    if (lane_id() >= step) before += other;
  }
  __syncthreads();
  if (lane_id() == 31) s_.partial[warp_in_block()] = before;
  __syncthreads();
  before -= own;
  for (int w = 0; w < warp_in_block(); ++w) before += s_.partial[w];
  for (int i = begin; i < end; ++i) {
    const std::uint64_t own_value = value(i);
    store(i, before);
    before += own_value;
  }
  if (begin < count && end == count) store(count, before);
  __syncthreads();
}

// Zones of all experts, padded rows of all ranks, this block's first rows.
__device__ inline void Prepare::place() {
  const auto alignment = static_cast<std::uint64_t>(p_.alignment);
  const std::uint32_t* base = block_base(static_cast<int>(blockIdx.x));
  for (int c = thread(); c < columns_; c += threads()) {
    next_[c] = base[c];
    if (c >= g_.experts) continue;
    next_[c] += p_.scratch[scratch_.expert_base + c];
    zone_[c] = p_.scratch[scratch_.expert_total + c];
  }
  if (thread() == 0) {
    s_.overflow_rank = s_.bad_id_rank = INT32_MAX;
    s_.bad_ids = 0;
    s_.dropped_rows = 0;
    s_.checksum = 0;
  }
  __syncthreads();
  // As one sequence over all ranks, of which start[d] is where rank d begins.
  scan(
      g_.experts, [&](int e) { return (zone_[e] + alignment - 1) / alignment * alignment; },
      [&](int e, std::uint64_t sum) {
        if (e % g_.local_experts == 0) s_.start[e / g_.local_experts] = sum;
        if (e < g_.experts) zone_[e] = static_cast<std::uint32_t>(sum);
      });
  for (int e = thread(); e < g_.experts; e += threads()) {
    const int d = e / g_.local_experts;
    const bool far = s_.start[d + 1] - s_.start[d] >= kFarRow;
    zone_[e] = far ? kFarRow : zone_[e] - static_cast<std::uint32_t>(s_.start[d]);
  }
  __syncthreads();
  find_overflow();
  open_counters();
  if (g_.keeps_items && s_.recount == 0) count_items();
}

// Without drops: how many items and rows every source has here.
__device__ inline void Prepare::count_items() {
  for (int s = warp_in_block(); s < g_.ranks(); s += warps_per_block()) {
    std::uint32_t rows = 0;
    for (int e = lane_id(); e < g_.local_experts; e += 32) {
      rows += said(s, layout_.expert(g_.rank() * g_.local_experts + e));
    }
    for (int step = 16; step > 0; step /= 2) rows += __shfl_xor_sync(kAllLanes, rows, step);
    if (lane_id() == 0) s_.told[s] = {said(s, layout_.rank(g_.rank())), rows};
  }
}

__device__ inline void Prepare::find_overflow() {
  const int d = thread();
  if (d < g_.ranks()) {
    const std::uint32_t bad = said(d, layout_.bad_ids());
    std::uint64_t total = s_.start[d + 1] - s_.start[d];
    if (!g_.expert_major) {
      total = 0;
      for (int s = 0; s < g_.ranks(); ++s) total += said(s, layout_.rank(d));
    }
    s_.total[d] = total;
    if (total > capacity_of(d)) atomicMin(&s_.overflow_rank, d);
    if (bad > 0) atomicMin(&s_.bad_id_rank, d);
    atomicAdd(&s_.bad_ids, static_cast<unsigned long long>(bad));
  }
  __syncthreads();
  if (threadIdx.x == 0) s_.recount = g_.drop && s_.overflow_rank != INT32_MAX ? 1 : 0;
  __syncthreads();
}

// The counters become the next number of each column, for every warp.
__device__ inline void Prepare::open_counters() {
  for (int c = thread(); c < columns_; c += threads()) {
    std::uint64_t next = next_[c];
    if (c < g_.experts) {
      next += zone_[c];
    } else if (!g_.expert_major && c < g_.experts + g_.ranks()) {
      for (int s = 0; s < g_.rank(); ++s) next += said(s, layout_.rank(c - g_.experts));
    }
    for (int w = 0; w < warps_per_block(); ++w) {
      const std::uint32_t count = counter(w)[c];
      counter(w)[c] = saturate(next);
      next += count;
    }
  }
  __syncthreads();
}

}  // namespace xd::ep::cuda
