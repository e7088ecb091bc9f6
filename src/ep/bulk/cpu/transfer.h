// Parts that the row-moving operations share: receive tensors of this rank as peers reach them, the
// peers' tensors as this rank reaches them, and the rows of one token.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "base/math.h"
#include "ep/bulk/cpu/loads.h"
#include "ep/bulk/cpu/lockstep.h"
#include "ep/bulk/cpu/numbering.h"
#include "ep/bulk/group.h"
#include "ep/bulk/part_order.h"
#include "ep/plan/cpu/rows.h"

namespace xd::ep::cpu {

// A near rank's receive tensors of the current operation; those that are not given are no memory.
struct RankTensors {
  NearMemory rows;
  NearMemory scales;
  NearMemory weights;
  NearMemory extra;
  // True if the tensor is staged and its owner keeps lists. Then a token's row stands only in the
  // first of its rows: see ReceiveTensor.
  bool one_row_per_token = false;
  bool one_scale_per_token = false;
  std::int64_t num_rows = 0;
  bool wide_indices = false;
};

// Working memory of a group; all of it is allocated when the group is made.
struct Scratch {
  std::vector<RankTensors> ranks;           // [W]
  std::vector<std::uint32_t> table;         // [W][CountLayout] counts of all ranks
  std::vector<std::int64_t> kept_pairs;     // [L]
  std::vector<std::byte> quantised;         // one quantised row
  std::vector<std::byte> quantised_scales;  // and its scales
  std::vector<std::byte> scales;            // one row of scales, packed
  ChoicesMemory choices;
  Placement placement;
  NumberingMemory numbering;
  Loads loads;

  // Calls visit(vector, size) for every vector, including those of the members.
  template <class Visit>
  void for_each_vector(const Config& config, Visit&& visit) {
    const auto num_ranks = static_cast<std::size_t>(config.ranks);
    visit(ranks, num_ranks);
    visit(table, num_ranks * CountLayout{config.experts, config.ranks}.size());
    visit(kept_pairs, static_cast<std::size_t>(config.local_experts));
    visit(quantised, config.max_row_bytes / 2);  // e4m3 rows have half the bytes of bf16 rows
    visit(quantised_scales, quantised_scale_bytes(config.max_row_bytes));
    visit(scales, config.max_scale_bytes);
    choices.for_each_vector(config, visit);
    placement.for_each_vector(config, visit);
    numbering.for_each_vector(config, visit);
    loads.for_each_vector(config, visit);
  }
  void reserve(const Config& config);
  static std::size_t bytes(const Config& config);
};

struct Context {
  Group& group;
  Lockstep& lockstep;
  Scratch& scratch;
  PartOrder& order;
};

// The local experts whose zones are in a scope: [first, end).
struct ScopeExperts {
  int first, end;
};
inline ScopeExperts experts_of(const PlanView& plan, const Scope& scope) {
  const int local = plan.header().local_experts;
  return {scope.first_expert(plan.parts(), local), scope.end_expert(plan.parts(), local)};
}

// Calls body(first, count) for each run of receive rows that hold a token's row.
template <class Body>
void for_each_run(const PlanView& plan, const Config& config, const Scope& scope, Body&& body) {
  if (scope.empty) return;
  const auto [first, end] = experts_of(plan, scope);
  if (!config.layout.has_zones || plan.header().alignment == 1) {
    const std::int64_t begin = scope.part == 0 ? 0 : plan.offset(first);
    const std::int64_t rows =
        (scope.part == 0 ? plan.header().recv_rows : plan.offset(end)) - begin;
    if (rows > 0) body(begin, rows);
    return;
  }
  for (int e = first; e < end; ++e) {
    if (plan.count(e) > 0) body(std::int64_t{plan.offset(e)}, std::int64_t{plan.count(e)});
  }
}

// Calls body(first, count) for each run of receive rows that hold no token's row and must read as
// zero: padding, and with zero_tail the tail.
template <class Body>
void for_each_gap(const PlanView& plan, const Config& config, const Scope& scope,
                  std::int64_t tensor_rows, Body&& body) {
  if (config.layout.has_zones && plan.header().alignment > 1 && !scope.empty) {
    const auto [first, end_expert] = experts_of(plan, scope);
    for (int e = first; e < end_expert; ++e) {
      const std::int64_t end = std::int64_t{plan.offset(e)} + plan.count(e);
      if (plan.offset(e + 1) > end) body(end, plan.offset(e + 1) - end);
    }
  }
  const std::int64_t rows = plan.header().recv_rows;
  if (config.zero_tail && tensor_rows > rows && scope.tail) body(rows, tensor_rows - rows);
}

// A token's rows in this rank's receive tensors, lowest first.
struct ListedRows {
  std::array<std::uint32_t, kMaxTopk> list;
  std::size_t count = 0;

  std::span<const std::uint32_t> rows() const { return {list.data(), count}; }
  PartSpan parts(const PlanView& plan) const;
  // Takes the token at `position` of the plan's list and moves on behind it. Rows that the plan's
  // tensors do not have are left out. At the end of the list it takes no rows.
  void take(const PlanView& plan, std::size_t& position);
};

// The part of a token, out of those of its rows at this rank, in which `scope` has it.
using PartOfToken = int PartSpan::*;

// Calls body(rows, next) for one token in the scope after another (EXPERT_MAJOR with staging). Both
// are spans of receive rows: those of the token, and those of the token after it.
template <class Body>
void for_each_token(const PlanView& plan, const Scope& scope, PartOfToken part_of_token,
                    Body&& body) {
  if (scope.empty) return;
  std::array<ListedRows, 2> tokens;
  std::size_t position = 0;
  const auto take = [&](ListedRows& token) {
    do {
      token.take(plan, position);
    } while (token.count > 0 && !scope.has(token.parts(plan).*part_of_token));
  };
  take(tokens[0]);
  for (std::size_t i = 0; tokens[i].count > 0; i = 1 - i) {
    take(tokens[1 - i]);
    body(tokens[i].rows(), tokens[1 - i].rows());
  }
}

// A receive tensor of this rank. It is used where it lies if that is symmetric memory and its rows
// are packed; otherwise it goes through the group's staging memory.
//
// In EXPERT_MAJOR a token may have several rows here. Where this rank stages rows, and so keeps
// lists, a token's rows of a staged tensor cross as one row, which stands in the place of the
// first. fan_out() copies it to all of them. In the other direction add_up() leaves the rows' sum
// there for peers to read. That sum is the partial sum of this rank, so the bits are those of a
// tensor that is used in place.
class ReceiveTensor {
 public:
  ReceiveTensor() = default;
  // Throws INVALID_ARGUMENT if the tensor has fewer rows than the plan needs, or would have to be
  // staged where there is no such memory.
  ReceiveTensor(const Context& context, const PlanView& plan, const Tensor& tensor,
                const Staging& staging);

  turn::PeerAddress place() const { return place_; }
  bool staged() const { return staged_ != nullptr; }

  // copy_in and copy_out copy row by row between tensor and staging. They do nothing for a tensor
  // that is not staged.
  void copy_in(const PlanView& plan, const Config& config, const Scope& scope) const;
  void copy_out(const PlanView& plan, const Config& config, const Scope& scope) const;

  // fan_out and add_up copy token by token, and without lists row by row as copy_out and copy_in
  // do. A token's row goes to all its places in the first of their parts, and its sum is made in
  // the last. `weights` has one number per row.
  void fan_out(const PlanView& plan, const Config& config, const Scope& scope) const;
  // Under a wire the sum stands there in the wire's form; where that may be longer than a row,
  // nothing is added up, and rows are copied.
  void add_up(const PlanView& plan, const Config& config, const Scope& scope, const float* weights,
              const WireFormat& wire) const;

  // The row that crossed for a token whose first row is `first`.
  const std::byte* crossed(std::uint32_t first) const {
    return staged_ + std::uint64_t{first} * tensor_.row_bytes();
  }

  void zero_gaps(const PlanView& plan, const Config& config, const Scope& scope) const;

 private:
  Tensor tensor_;
  turn::PeerAddress place_;
  std::byte* staged_ = nullptr;  // null = the tensor is used in place, or not given
};

// Opens the plan and checks it against the group.
PlanView open_plan(const Context& context, PlanBytes plan);

// Throws INVALID_ARGUMENT if the plan has no such part.
CallPart call_part(const PlanView& plan, const Portion& portion);

// Throws INVALID_ARGUMENT unless the tensor has a row per token, or a column per choice.
void require_tokens(const Tensor& tensor, const PlanView& plan);
void require_topk(const Tensor& tensor, const PlanView& plan);

// Returns OVERFLOW if the plan's operations move nothing.
OperationError overflow_of(const PlanView& plan);

struct RowSizes {
  std::uint64_t row = 0, scales = 0, weights = 0;  // bytes per receive row
  std::uint64_t extra = 0;                         // bytes per receive row; indices count as int32
  std::uint64_t scale_alignment =
      kRowAlignment;     // alignment of the tensor that `scales` stands for
  bool added_up = true;  // owners that keep lists have one row per token in staged tensors
};
// True unless sums of staged rows may be longer in the wire's form than rows.
inline bool adds_up(const WireFormat& wire) { return !wire.is_float(); }
// Fills scratch.ranks from the records of all ranks, for the tensors whose rows have bytes in
// `sizes`. Call it after await().
void resolve_tensors(const Context& context, const RowSizes& sizes);

// The rows of one token, by ascending rank, then ascending k; in RANK_MAJOR there is one per rank.
struct TokenRows {
  struct Row {
    RowRef ref;
    int k;
    int part = 0;        // from find_parts() on
    int first_part = 0;  // of the token's rows at that rank
  };
  std::array<Row, kMaxTopk> list;
  int count = 0;

  bool first_of_rank(int i) const {
    const auto n = static_cast<std::size_t>(i);
    return i == 0 || list[n - 1].ref.rank != list[n].ref.rank;
  }

  // Gathers only rows that near ranks' tensors have: other ranks' have none here. `codes` are those
  // of the token's choices.
  void gather(const Context& context, const std::uint32_t* codes, int topk);
  void find_parts(const PlanView& plan);
  // True if row i is to be stored in this call, where a token has one row there or each of its own.
  bool is_due(int i, bool one_per_token, const Scope& scope) const {
    if (one_per_token && !first_of_rank(i)) return false;
    return scope.has(one_per_token ? list[at(i)].first_part : list[at(i)].part);
  }
  bool is_any_due(const Scope& scope) const {
    return std::ranges::any_of(std::span(list).first(at(count)),
                               [&](const Row& row) { return scope.has(row.part); });
  }
  // From ascending rank to ascending host, and on each host ascending rank.
  void order_by_host(const HostMap& hosts);
};

// Outputs larger than the caches would be evicted before anyone reads them, so they are streamed
// past the caches.
inline rows::Store store_for(std::uint64_t bytes) {
  constexpr std::uint64_t kStreamingBytes = std::uint64_t{4} << 20;
  return bytes >= kStreamingBytes ? rows::Store::streaming : rows::Store::cached;
}

}  // namespace xd::ep::cpu
