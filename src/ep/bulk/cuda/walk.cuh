// The ways in which warps walk the work of an operation and read a plan. All roles use the same
// functions, so they cannot disagree.
#pragma once

#include "ep/bulk/cuda/turn.cuh"
#include "ep/plan/cuda/warp.cuh"

namespace xd::ep::cuda {

// The parts of a checked plan.
struct PlanParts {
  const std::uint32_t* code;
  const std::uint32_t* list;
  const std::uint32_t* start;
  const std::uint32_t* cell;
  const std::int32_t* count;
  const std::int32_t* offset;
  const std::int32_t* tokens;
  const std::int32_t* item_begin;
};

__device__ inline PlanParts parts_of(const std::byte* plan, const PlanHeader& header) {
  const PlanMap map = map_of(header, ep::parts_of(header));
  const auto at = [&](std::uint64_t offset) {
    return reinterpret_cast<const std::uint32_t*>(plan + offset);
  };
  const auto signed_at = [&](std::uint64_t offset) {
    return reinterpret_cast<const std::int32_t*>(plan + offset);
  };
  return {at(map.code),          at(map.list),
          at(map.start),         at(map.cell),
          signed_at(map.count),  signed_at(map.offset),
          signed_at(map.tokens), signed_at(map.item_begin)};
}

// ---- One token at its source: lane k looks at choice k -----------------------------------------

struct Choice {
  bool valid;   // the choice has a row, and the owner's tensor has that row
  bool leader;  // the first choice of the token at its rank: the row that crosses
  int rank;
  std::uint32_t row;
  int expert;  // RANK_MAJOR: local expert
};

// The rank whose receive tensor has a row, by the row's number over all ranks; there is one. Any
// thread.
__device__ inline int rank_of_row(const TurnShared& shared, int ranks, std::uint32_t global) {
  int low = 0, high = ranks;  // base[low] <= global < base[high]
#pragma unroll 1
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (shared.base[middle] <= global) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Decodes `code`, the code of this lane's choice. All lanes call it.
__device__ inline Choice decode(const Turn& turn, const TurnShared& shared, std::uint32_t code) {
  const GroupDevice& g = turn.group();
  Choice c{false, false, -1, 0, 0};
  const std::uint32_t global = g.layout.row_per_expert ? code : code / g.codec_experts;
  const int ranks = turn.ranks();
  if (code != RowCodec::kNone && global < shared.base[ranks]) {
    const int low = rank_of_row(shared, ranks, global);
    c.rank = low;
    c.row = global - shared.base[low];
    c.expert = g.layout.row_per_expert ? 0 : static_cast<int>(code % g.codec_experts);
    c.valid = c.row < shared.peer[low].num_rows;
  }
  c.leader = first_of_equals(static_cast<unsigned>(c.rank), c.valid);
  return c;
}

// The index of this leader's rank among the token's ranks, by ascending rank, and the number of
// those ranks. All lanes call it.
__device__ inline int order_of(const Choice& c, int& count) {
  unsigned leaders = __ballot_sync(kAllLanes, c.leader);
  count = __popc(leaders);
  int lower = 0;
#pragma unroll 1
  while (leaders != 0) {
    const int other = __ffs(static_cast<int>(leaders)) - 1;
    leaders &= leaders - 1;
    lower += __shfl_sync(kAllLanes, c.rank, other) < c.rank ? 1 : 0;
  }
  return lower;
}

// Whether the row of a choice is of the call's part, where the call selects one. Any thread.
__device__ inline bool has_row_in_part(const Turn& turn, const TurnShared& shared,
                                       std::uint32_t code) {
  const int ranks = turn.ranks();
  if (code == RowCodec::kNone || code >= shared.base[ranks]) return false;
  const int rank = rank_of_row(shared, ranks, code);
  return turn.peer(rank).part.has(code - shared.base[rank]);
}

// Leaves the choices whose rows move in the call's part: all of a token's rows at a rank come with
// the first of their parts. All lanes call it.
__device__ inline void keep_due(const Turn& turn, Choice& c) {
  PartRows part;
  if (c.valid) part = turn.peer(c.rank).part;
  const unsigned rows = equal_lanes(static_cast<unsigned>(c.rank), c.valid);
  const unsigned here = __ballot_sync(kAllLanes, c.valid && part.has(c.row));
  const unsigned earlier = __ballot_sync(kAllLanes, c.valid && part.is_earlier(c.row));
  c.valid = c.valid && is_due(rows, here, earlier);
  c.leader = c.leader && c.valid;
}

// ---- Units of work -----------------------------------------------------------------------------

// The blocks that begin a kind of work: the first blocks of the launch or its last ones. The first
// units of their warps are fixed; other warps join in when they are free.
struct Team {
  int first_block, blocks;
};

// The blocks that do not begin with the first role, or all blocks if each of them does.
__device__ inline Team blocks_behind(int first) {
  const auto blocks = static_cast<int>(gridDim.x);
  return first < blocks ? Team{first, blocks - first} : Team{0, blocks};
}

// The first unit of a warp of the team's blocks; -1 for others. Neighbouring units go to warps of
// different blocks, so that few units spread over all multiprocessors.
__device__ inline int first_unit(const Team& team) {
  const int block = static_cast<int>(blockIdx.x) - team.first_block;
  return block >= 0 && block < team.blocks ? warp_in_block() * team.blocks + block : -1;
}

// Gives each of the numbers 0 .. end - 1 to one warp of the launch, lower numbers first. A
// body(unit) that returns false ends the walk. `ahead`: a warp takes its next number before it
// works on the one it has, so that it does not wait for the counter. It pays where units are small;
// large ones should not lie with a warp that is late.
template <class Body>
__device__ bool for_each_unit(const Turn& turn, int counter, const Team& team, int end, bool ahead,
                              Body&& body) {
  std::uint32_t* next = &turn.group().control->next_unit[counter];
  const int warps = team.blocks * warps_per_block();
  const bool more = end > warps;  // than the fixed ones
  const auto take = [&] { return more && lane_id() == 0 ? ptx::add_relaxed_gpu(next, 1) : 0; };
  const auto number_of = [&](std::uint32_t taken) {
    return more ? warps + static_cast<int>(__shfl_sync(kAllLanes, taken, 0)) : end;
  };
  int unit = first_unit(team);
  if (unit < 0) unit = number_of(take());
#pragma unroll 1
  while (unit < end) {
    std::uint32_t taken = ahead ? take() : 0;
    if (!body(unit)) return false;
    if (!ahead) taken = take();
    unit = number_of(taken);
  }
  return true;
}

// ---- Items of a source at the owner of their rows ----------------------------------------------

struct ItemRange {
  int first, last;  // items [first, last)
};

// The items of `source` whose tokens are [token, token + tokens). All lanes call it; sixteen lanes
// search for each end.
__device__ inline ItemRange items_of(const Turn& turn, const PlanParts& plan, int source, int token,
                                     int tokens) {
  const auto capacity = static_cast<int>(turn.group().capacity);
  const auto per_token = static_cast<std::uint32_t>(turn.group().cells_per_token(turn.plan().topk));
  const int begin = min(max(plan.item_begin[source], 0), capacity);
  const int end = min(max(plan.item_begin[source + 1], begin), capacity);
  const int half = lane_id() / 16, position = lane_id() % 16;
  const std::uint64_t wanted =
      static_cast<std::uint64_t>(token + (half == 0 ? 0 : tokens)) * per_token;
  int low = begin, high = end;  // the answer lies in [low, high]
#pragma unroll 1
  while (__any_sync(kAllLanes, low < high)) {
    // The lanes look at sixteen items, evenly spread, with the last of [low, high) among them.
    const int size = high - low;
    const int step = (size + 15) / 16;
    const int at = low + min((position + 1) * step, size) - 1;
    const bool below = size > 0 && plan.cell[at] < wanted;
    const unsigned votes = __ballot_sync(kAllLanes, below) >> (half * 16) & 0xFFFFu;
    const int passed = __popc(votes);  // number of these items that lie below
    if (size > 0) {
      const int new_low = passed == 0 ? low : low + min(passed * step, size);
      high = passed == 16 ? high : low + min((passed + 1) * step, size) - 1;
      low = min(new_low, high);
    }
  }
  return {__shfl_sync(kAllLanes, low, 0), __shfl_sync(kAllLanes, low, 16)};
}

// An item's rows. Lane i has the i-th row, by ascending k.
struct ItemRows {
  int count;
  std::uint32_t row;  // the row of this lane, if lane < count
};

// The items of a range, up to 31, that the call deals with, as bits. In a call with a part these
// are the items of whose parts it is the first, or `sums`: the last one. A lane looks at an item,
// so that items of other parts cost little. All lanes call it.
__device__ inline unsigned due_items(const Turn& turn, const PlanParts& plan,
                                     const ItemRange& range, bool sums) {
  const int count = min(max(range.last - range.first, 0), 31);  // more only in damaged plans
  if (!turn.selects()) return (1u << count) - 1;
  const PartRows& part = turn.peer(turn.rank()).part;
  unsigned here = 0, other = 0;
  if (lane_id() < count) {
    const auto capacity = static_cast<std::uint32_t>(turn.group().capacity);
    const int item = range.first + lane_id();
    const std::uint32_t begin = min(plan.start[item], capacity);
    const std::uint32_t end = min(min(plan.start[item + 1], capacity), begin + 32);
#pragma unroll 1
    for (std::uint32_t i = begin; i < end; ++i) {
      const std::uint32_t row = plan.list[i];
      here |= part.has(row) ? 1 : 0;
      other |= (sums ? part.is_later(row) : part.is_earlier(row)) ? 1 : 0;
    }
  }
  return __ballot_sync(kAllLanes, is_due(1, here, other));
}

// Calls body(rows, cell) for those items of a range that `due` has, which belong to one chunk; the
// next item's rows are fetched meanwhile. All lanes call it.
template <class Body>
__device__ void for_each_item(const Turn& turn, const PlanParts& plan, const ItemRange& range,
                              unsigned due, Body&& body) {
  static_assert(sent_chunks(true).most_tokens < 32 && summed_chunks().most_tokens < 32);
  const bool listed = turn.group().layout.row_per_expert;  // else items are rows
  const auto capacity = static_cast<std::uint32_t>(turn.group().capacity);
  const auto limit = static_cast<std::uint32_t>(turn.plan().recv_rows);
  const int lane = lane_id();
  const int count = min(range.last - range.first, 31);
  const std::uint32_t cells = lane < count ? plan.cell[range.first + lane] : 0;
  std::uint32_t starts = static_cast<std::uint32_t>(range.first + lane);
  if (listed) starts = lane <= count ? min(plan.start[range.first + lane], capacity) : 0;
  const auto rows_at = [&](int i) {
    const std::uint32_t first = __shfl_sync(kAllLanes, starts, i);
    const std::uint32_t last = __shfl_sync(kAllLanes, starts, i + 1);
    const std::uint32_t rows = last > first ? min(last - first, 32u) : 0;
    const bool mine = static_cast<std::uint32_t>(lane) < rows;
    return ItemRows{static_cast<int>(rows), !mine ? 0 : listed ? plan.list[first + lane] : first};
  };
  const auto first_of = [](unsigned bits) { return __ffs(static_cast<int>(bits)) - 1; };
  ItemRows next = due != 0 ? rows_at(first_of(due)) : ItemRows{0, 0};
#pragma unroll 1
  while (due != 0) {
    const int i = first_of(due);
    due &= due - 1;
    ItemRows rows = next;
    if (due != 0) next = rows_at(first_of(due));
    const bool good = lane >= rows.count || rows.row < limit;
    if (!__all_sync(kAllLanes, good)) rows.count = 0;
    body(rows, __shfl_sync(kAllLanes, cells, i));
  }
}

// Waits until the rows of a chunk are here; false = fatal. All lanes call it.
__device__ inline bool await_chunk(const Turn& turn, int source, int flag) {
  bool here = true;
  if (lane_id() == 0) here = turn.wait_chunk(source, flag);
  if (!__shfl_sync(kAllLanes, here, 0)) return false;
  __syncwarp();  // passes the acquire on to all lanes
  return true;
}

// One strip of a row: vectors [first, last) of 16 bytes. Cutting a row into twice as many strips
// cuts each strip in two.
struct Columns {
  std::uint32_t first, last;

  __device__ static Columns strip_of(std::uint64_t row_bytes, int strip, int strips) {
    const auto vectors = static_cast<std::uint32_t>(row_bytes / 16);
    return {vectors * strip / strips, vectors * (strip + 1) / strips};
  }
};

// The rows that a source announces with one flag.
struct Arrival {
  int source, flag;
  int token, tokens;  // the source's first token, and how many follow
  int strip, strips;  // one strip of their rows, and how many there are
};

// Calls body(arrival) for every arrival, in the order in which arrivals come in: all sources side
// by side, beginning with the next rank. Rows of `cut_bytes` bytes may come in strips; 0: they do
// not. A body that returns false ends the walk.
template <class Body>
__device__ bool for_each_arrival(const Turn& turn, const PlanParts& plan, const ChunkFlags& chunks,
                                 std::uint64_t cut_bytes, int counter, const Team& team,
                                 Body&& body) {
  const int ranks = turn.ranks();
  int most = 0;
#pragma unroll 1
  for (int s = 0; s < ranks; ++s) {
    const int tokens = max(plan.tokens[s], 0);
    most = max(most, chunks.count(tokens) * chunks.strips(tokens, cut_bytes));
  }
  most = min(most, turn.group().chunk_stride);
  return for_each_unit(turn, counter, team, most * ranks, false, [&](int unit) {
    Arrival a{};
    a.source = (turn.rank() + unit % ranks) % ranks;
    a.flag = unit / ranks;
    const int all = min(plan.tokens[a.source], turn.group().max_tokens);
    const int each = chunks.tokens_per_chunk(all);
    a.strips = chunks.strips(all, cut_bytes);
    a.strip = a.flag % a.strips;
    a.token = a.flag / a.strips * each;
    if (a.token >= all) return true;
    a.tokens = min(each, all - a.token);
    return body(a);
  });
}

}  // namespace xd::ep::cuda
