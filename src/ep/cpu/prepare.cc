// prepare: counts first, then rows.
//
//   1  count this rank's choices per expert and rank; ids that do not count become "none"
//   2  exchange counts; every rank derives every zone, every overflow and its own first rows
//   3  number this rank's rows in (token, k) order
//   4  tell each rank which of its rows are one token's (EXPERT_MAJOR, if it stages), or what it
//      still gets per expert (RANK_MAJOR under DROP, if it overflows)
//
// The plan's codes hold local working values between 1 and 3: the expert id of each choice.
#include <algorithm>
#include <cstring>

#include "base/hash.h"
#include "base/math.h"
#include "ep/cpu/operations.h"
#include "ep/verdict.h"

namespace xd::ep::cpu {
namespace {

// Writes values into an optional int32 or int64 output; what does not fit into 32 bits is cut off
// at the largest number that does.
template <class Value>
void write_numbers(const Tensor& out, std::int64_t count, Value&& value) {
  if (!out) return;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t v = value(i);
    if (out.type == DType::i64) {
      out.as<std::int64_t>()[i] = v;
    } else {
      out.as<std::int32_t>()[i] = static_cast<std::int32_t>(std::min<std::int64_t>(v, INT32_MAX));
    }
  }
}

}  // namespace

PrepareOp::PrepareOp(const Context& context, const xd_ep_prepare_args* args)
    : context_(context),
      call_(read_prepare(args, context.group.call_context())),
      tokens_(static_cast<int>(call_.topk_idx.rows)),
      topk_(static_cast<int>(call_.topk_idx.cols)) {}

Record PrepareOp::record() const { return describe(call_); }

// Up to where its list begins.
PlanMap PrepareOp::plan_map() const {
  return PlanMap::make({.local_experts = config().local_experts,
                        .tokens = tokens_,
                        .topk = topk_,
                        .list_rows = 0,
                        .items = 0,
                        .ranks = config().ranks});
}

std::uint32_t* PrepareOp::codes() const {
  const PlanMap map = plan_map();
  return reinterpret_cast<std::uint32_t*>(call_.plan + map.code);
}

void PrepareOp::stage_in() {
  // Whatever plan these bytes were, they are none from now on.
  std::memset(call_.plan, 0, sizeof(PlanHeader));
  normalise_ids();
}

// A choice counts if its id is an expert's and this row has not named that expert before. Others
// are bad, but for those of a group that collapses duplicates.
void PrepareOp::normalise_ids() {
  const CountLayout layout{config().experts, config().ranks};
  std::vector<std::uint32_t>& counts = context_.scratch.counts;
  std::vector<std::uint32_t>& seen = context_.scratch.seen;
  std::ranges::fill(counts, 0);
  counts[layout.tokens()] = static_cast<std::uint32_t>(tokens_);
  std::ranges::fill(seen, 0);
  std::uint32_t* code = codes();
  for (std::int64_t i = 0; i < std::int64_t{tokens_} * topk_; ++i) {
    const auto mark = static_cast<std::uint32_t>(i / topk_) + 1;  // tells this token's marks apart
    const std::int64_t id = call_.topk_idx.type == DType::i64
                                ? call_.topk_idx.as<std::int64_t>()[i]
                                : call_.topk_idx.as<std::int32_t>()[i];
    code[i] = RowCodec::kNone;
    if (id == -1) continue;
    const bool inside = id >= 0 && id < config().experts;
    if (!inside || seen[at(id)] == mark) {
      if (!inside || !config().collapse) ++counts[layout.bad_ids()];
      continue;
    }
    const auto expert = static_cast<int>(id);
    const int rank = expert / config().local_experts;
    seen[at(id)] = mark;
    code[i] = static_cast<std::uint32_t>(id);
    ++counts[layout.expert(expert)];
    std::uint32_t& rank_seen = seen[at(config().experts + rank)];
    if (rank_seen != mark) ++counts[layout.rank(rank)];
    rank_seen = mark;
  }
}

void PrepareOp::announce() { context_.lockstep.send_counts(context_.scratch.counts); }

void PrepareOp::move() {
  Scratch& scratch = context_.scratch;
  const int rank = context_.group.rank();
  std::ranges::copy(scratch.counts, scratch.table.begin() + static_cast<std::ptrdiff_t>(
                                                                at(rank) * scratch.counts.size()));
  context_.lockstep.await_counts(scratch.table);
  const CountTable table{{config().experts, config().ranks}, scratch.table};
  scratch.placement.place(table, config(), context_.group.capacities(), {rank, call_.alignment});
  hash_plan();
  assign_rows();
  if (!config().expert_major() && config().overflow == XD_EP_OVERFLOW_DROP) send_kept();
}

void PrepareOp::hash_plan() {
  const std::vector<std::uint32_t>& table = context_.scratch.table;
  std::uint64_t counts = 0;
  for (std::size_t i = 0; i < table.size(); ++i) counts += hash_entry(i, table[i]);
  fingerprint_ = plan_fingerprint({.counts = counts,
                                   .capacities = context_.group.plan_binding().capacities,
                                   .topk = topk_,
                                   .alignment = call_.alignment,
                                   .group = context_.group.number(),
                                   .epoch = context_.lockstep.epoch()});
}

// Replaces expert ids by row codes. first_row becomes the next row of each zone.
void PrepareOp::assign_rows() {
  Scratch& scratch = context_.scratch;
  std::ranges::fill(scratch.kept, 0);
  open_lists();
  std::uint32_t* code = codes();
  for (int t = 0; t < tokens_; ++t, code += topk_) {
    std::ranges::fill(scratch.row_of, std::int64_t{-1});
    for (int k = 0; k < topk_; ++k) {
      if (code[k] == RowCodec::kNone) continue;
      const auto expert = static_cast<int>(code[k]);
      const RowRef ref = next_row(expert);
      const bool kept = ref.row < capacity_of(ref.rank);
      code[k] = kept ? context_.group.codec().encode(ref) : RowCodec::kNone;
      if (kept) ++scratch.kept[at(expert)];
    }
  }
}

// Where the current token's row for `expert` goes; it may lie beyond the capacity. row_of has the
// token's first row in each rank so far.
RowRef PrepareOp::next_row(int expert) const {
  Scratch& scratch = context_.scratch;
  const int rank = expert / config().local_experts;
  std::vector<std::int64_t>& next = scratch.placement.first_row;
  std::int64_t& first = scratch.row_of[at(rank)];
  if (!config().expert_major()) {
    if (first < 0) first = next[at(rank)]++;
    return {.rank = rank, .row = first, .expert = expert % config().local_experts};
  }
  const std::int64_t row = next[at(expert)]++;
  std::uint32_t* const list = scratch.lists[at(rank)];
  if (list != nullptr && row < capacity_of(rank)) {
    const auto entry = static_cast<std::uint32_t>(row);
    list[++*list] = first < 0 ? entry | PlanHeader::kFirstOfToken : entry;
    first = row;
  }
  return {.rank = rank, .row = row, .expert = 0};
}

// Into each rank that overflows: this rank's surviving choices of that rank's experts. Covered by
// this operation's done flag.
void PrepareOp::send_kept() const {
  const Scratch& scratch = context_.scratch;
  const auto local = at(config().local_experts);
  for (int d = 0; d < config().ranks; ++d) {
    if (scratch.placement.total[at(d)] <= capacity_of(d)) continue;
    std::byte* area = context_.lockstep.area_of(d, context_.lockstep.map_of(d).kept);
    auto* row = reinterpret_cast<std::uint32_t*>(area) + at(context_.group.rank()) * local;
    std::copy_n(scratch.kept.begin() + static_cast<std::ptrdiff_t>(at(d) * local), local, row);
  }
}

// This rank's lists in the ranks that keep some, empty. Covered by this operation's done flag.
void PrepareOp::open_lists() const {
  for (int d = 0; d < config().ranks; ++d) {
    std::uint32_t*& list = context_.scratch.lists[at(d)];
    const bool keeps = context_.group.config_of(d).keeps_lists();
    list = keeps ? list_of(d, context_.group.rank()) : nullptr;
    if (keeps) *list = 0;
  }
}

std::uint32_t* PrepareOp::list_of(int owner, int source) const {
  std::byte* area = context_.lockstep.area_of(owner, context_.lockstep.map_of(owner).lists);
  return reinterpret_cast<std::uint32_t*>(area) + at(source) * GroupMap::list_words(config());
}

// Every source's list, one after another; returns how many rows there are.
std::int64_t PrepareOp::collect_lists() {
  if (!config().keeps_lists()) return 0;
  const PlanMap map = plan_map();
  auto* to = reinterpret_cast<std::uint32_t*>(call_.plan + map.list);
  std::int64_t rows = 0;
  for (int s = 0; s < config().ranks; ++s) {
    const std::uint32_t* list = list_of(context_.group.rank(), s);
    const std::int64_t count = std::min<std::int64_t>(
        {*list, static_cast<std::int64_t>(config().rows_per_source()), config().capacity - rows});
    std::copy_n(list + 1, count, to + rows);
    rows += count;
  }
  return rows;
}

void PrepareOp::collect_kept() {
  Scratch& scratch = context_.scratch;
  const int rank = context_.group.rank();
  const auto local = at(config().local_experts);
  const auto* area = reinterpret_cast<const std::uint32_t*>(
      context_.lockstep.area_of(rank, context_.lockstep.map_of(rank).kept));
  std::ranges::fill(scratch.kept_pairs, 0);
  for (std::size_t i = 0; i < at(config().ranks) * local; ++i) {
    scratch.kept_pairs[i % local] += area[i];
  }
  scratch.placement.cut_pairs(scratch.kept_pairs, call_.alignment);
}

Setback PrepareOp::finish() {
  const Placement& placement = context_.scratch.placement;
  const bool drop = config().overflow == XD_EP_OVERFLOW_DROP;
  if (!config().expert_major() && drop && placement.dropped_rows > 0) collect_kept();
  write_plan();
  write_outputs();
  context_.group.count_losses(placement.bad_ids, drop ? placement.dropped_rows : 0);
  return report();
}

void PrepareOp::write_plan() {
  const Placement& p = context_.scratch.placement;
  const PlanMap map = plan_map();
  const auto clip = [](std::int64_t v) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(v, INT32_MAX));
  };
  auto* count = reinterpret_cast<std::int32_t*>(call_.plan + map.count);
  auto* offset = reinterpret_cast<std::int32_t*>(call_.plan + map.offset);
  std::ranges::transform(p.count, count, clip);
  std::ranges::transform(p.offset, offset, clip);
  PlanHeader header{};
  header.rank = context_.group.rank();
  header.ranks = config().ranks;
  header.experts = config().experts;
  header.tokens = tokens_;
  header.topk = topk_;
  header.layout = config().layout;
  header.alignment = call_.alignment;
  header.overflow = config().overflow;
  header.keeps_list = config().keeps_lists() ? 1 : 0;
  header.list_rows = collect_lists();
  header.bad_id_rank = p.bad_id_rank;
  header.overflow_rank = p.overflow_rank;
  header.recv_rows = p.recv_rows;
  header.total_rows = p.total[at(header.rank)];
  header.bad_ids = p.bad_ids;
  if (p.overflow_rank >= 0) {
    header.overflow_needed = p.total[at(p.overflow_rank)];
    header.overflow_capacity = capacity_of(p.overflow_rank);
  }
  header.capacities = context_.group.plan_binding().capacities;
  header.capacity = config().capacity;
  header.fingerprint = fingerprint_;
  header.epoch = context_.lockstep.epoch();
  std::memcpy(call_.plan, &header, sizeof(header));
  seal_plan(call_.plan);
}

void PrepareOp::write_outputs() const {
  const Placement& p = context_.scratch.placement;
  const std::int64_t local = config().local_experts;
  const std::int64_t ranks = config().ranks;
  write_numbers(call_.counts, local, [&](std::int64_t e) { return p.count[at(e)]; });
  write_numbers(call_.padded_counts, local,
                [&](std::int64_t e) { return p.offset[at(e + 1)] - p.offset[at(e)]; });
  write_numbers(call_.offsets, local + 1, [&](std::int64_t e) { return p.offset[at(e)]; });
  write_numbers(call_.total, 1, [&](std::int64_t) { return p.total[at(context_.group.rank())]; });
  write_numbers(call_.rank_rows, ranks * ranks, [&](std::int64_t i) { return p.rank_rows[at(i)]; });
}

Setback PrepareOp::report() const {
  const Placement& p = context_.scratch.placement;
  const PlanView plan = PlanView::open(call_.plan, plan_size(config()));
  if (Setback found = overflow_of(plan)) return found;
  if (p.bad_ids == 0) return {};
  return bad_expert_ids(p.bad_ids, p.bad_id_rank, config().experts);
}

}  // namespace xd::ep::cpu
