// The receive half of dispatch of low latency on the CPU. It goes through the items of all sources
// twice: where a row lies may follow from the counts of all.
//
//   1. items from peers' memory and messages to the plan; counts
//   2. rows to their places, which take the places of experts in the plan's items
#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/math.h"
#include "ep/plan/plan.h"
#include "ep/slots/cpu/dispatch.h"
#include "ep/slots/cpu/remote/pipelines.h"
#include "ep/slots/family.h"
#include "ep/slots/placement.h"
#include "turn/unjudged_reads.h"

namespace xd::ep::cpu {
namespace {

// An element of an int32 or int64 output.
void set_number(const Tensor& out, std::int64_t i, std::int64_t value) {
  if (out.type == DType::i64) {
    out.as<std::int64_t>()[i] = value;
  } else {
    out.as<std::int32_t>()[i] = static_cast<std::int32_t>(value);
  }
}
std::int64_t number(const Tensor& of, std::int64_t i) {
  return of.type == DType::i64 ? of.as<std::int64_t>()[i] : of.as<std::int32_t>()[i];
}

// Each is one of so many, once, or -1.
bool are_experts(std::span<const std::int32_t> list, std::int32_t experts) {
  for (std::size_t k = 0; k < list.size(); ++k) {
    const bool again =
        std::ranges::find(list.first(k), list[k]) != list.begin() + std::ptrdiff_t(k);
    if (list[k] < -1 || list[k] >= experts || (list[k] >= 0 && again)) return false;
  }
  return true;
}

}  // namespace

LlOperationError LlDispatch::receive(bool own_staged) {
  own_staged_ = own_staged;
  Pipeline& pipeline = context_.pipeline;
  sent_ = pipeline.own_record();
  receiving_ = message_layout(sent_);
  // These bytes may have been a plan before; they are none from now on.
  std::memset(receive_.plan, 0, sizeof(PlanHeader));
  observe::WaitTimes times = wait_times(context_, receive_.wait_ns);
  pipeline.await(times);
  if (LlOperationError found = verdict(pipeline, context_.self())) return found;
  const std::uint64_t item_bytes = ll_item_bytes(static_cast<int>(sent_.topk));
  std::byte* const items = receive_.plan + plan_map().items;
  std::vector<std::uint64_t>& listed = context_.scratch.listed;
  std::ranges::fill(context_.scratch.counts, 0);
  std::uint64_t count = 0;
  for (int source = 0; source < config().ranks; ++source) {
    listed[at(source)] = take_items(source, items + count * item_bytes);
    count += listed[at(source)];
  }
  begin_rows();
  std::byte* of_source = items;
  for (int source = 0; source < config().ranks; ++source) {
    place_rows(source, of_source);
    of_source += listed[at(source)] * item_bytes;
  }
  end_rows();
  write_plan(static_cast<std::int64_t>(count));
  write_counts();
  return report();
}

// ---- Items -------------------------------------------------------------------------------------

// Writes a source's items into the plan, with experts in place of rows; returns how many there are.
std::uint64_t LlDispatch::take_items(int source, std::byte* plan_items) {
  if (!context_.pipeline.here().has(source)) return 0;
  const int topk = static_cast<int>(sent_.topk);
  const auto near = context_.group.comm().hosts().find_near(source);
  if (!near) judge_remote(source);
  const std::uint64_t count =
      near ? std::min(context_.memory.listed(own_cell(source)), at(config().max_tokens))
           : message_of(source).header.items;
  for (std::uint64_t i = 0; i < count; ++i) {
    const turn::UnjudgedReads reads(config().masks_lost_peers);
    take_item(near ? context_.memory.item(own_cell(source), i, topk) : remote_item(source, i),
              *reinterpret_cast<LlItem*>(plan_items + i * ll_item_bytes(topk)));
  }
  return count;
}

// The message is here: pipeline.await() has returned.
const LlRemoteMessage& LlDispatch::message_of(int source) const {
  return *context_.remote->find(source, LlRemotePipeline::Part::entry, context_.pipeline.next());
}

const LlItem& LlDispatch::remote_item(int source, std::uint64_t i) const {
  return *reinterpret_cast<const LlItem*>(message_of(source).item(i, receiving_.item_bytes()));
}

void LlDispatch::judge_remote(int source) const {
  const LlRecord& record = context_.pipeline.records()[at(source)];
  const LlRemoteMessage& message = message_of(source);
  context_.remote->judge([&] {
    message.require_items(std::min<std::uint64_t>(record.tokens, at(config().max_tokens)),
                          receiving_.item_bytes());
    if (record.tokens > at(config().max_tokens))
      message.refuse("its sender has more tokens than the group allows");
    for (std::uint64_t i = 0; i < message.header.items; ++i) {
      const LlItem& item = remote_item(source, i);
      const bool ascends = i == 0 || item.token() > remote_item(source, i - 1).token();
      if (item.source() != source || at(item.token()) >= record.tokens || !ascends)
        message.refuse("it has a token that its sender has not");
      if (!are_experts({item.rows(), at(sent_.topk)}, config().local_experts))
        message.refuse("it has an expert that this rank has not, or one twice");
    }
  });
}

// Copies an item, and counts its rows.
void LlDispatch::take_item(const LlItem& from, LlItem& to) {
  const int topk = static_cast<int>(sent_.topk);
  std::vector<std::int64_t>& counts = context_.scratch.counts;
  to.source_token = from.source_token;
  to.place = from.place;
  for (int k = 0; k < topk; ++k) {
    const std::int32_t expert = from.rows()[k];
    // An expert cannot be full, unless the source's memory is damaged.
    const bool good = expert >= 0 && expert < config().local_experts &&
                      counts[at(expert)] < slots_per_expert(config());
    to.rows()[k] = good ? expert : -1;
    if (good) ++counts[at(expert)];
  }
  if ((sent_.flags & kWeighted) != 0) {
    std::copy_n(from.weights(topk), topk, to.weights(topk));
  } else {
    std::fill_n(to.weights(topk), topk, 0.0f);
  }
}

// ---- Rows --------------------------------------------------------------------------------------

// Rows are numbered over all experts: row r is slot r % S of expert r / S of recv_tokens.
void LlDispatch::begin_rows() {
  LlScratch& scratch = context_.scratch;
  rows_ = 0;
  for (std::size_t e = 0; e < scratch.next.size(); ++e) {
    scratch.next[e] = rows_;
    if (config().has_slots()) {
      rows_ += slots_per_expert(config());
    } else if (!config().by_rank()) {
      receive_.row_offsets.as<std::int64_t>()[e] = rows_;
      rows_ += static_cast<std::int64_t>(round_up(at(scratch.counts[e]), at(config().alignment)));
    }
  }
}

// Places a source's rows, whose numbers take the places of experts in its items.
void LlDispatch::place_rows(int source, std::byte* plan_items) {
  LlScratch& scratch = context_.scratch;
  const int topk = static_cast<int>(sent_.topk);
  const std::uint64_t count = scratch.listed[at(source)];
  std::ranges::copy(scratch.next, scratch.first.begin());
  if (config().by_rank()) receive_.row_offsets.as<std::int64_t>()[source] = rows_;
  const auto near = context_.group.comm().hosts().find_near(source);
  for (std::uint64_t i = 0; i < count; ++i) {
    auto& item = *reinterpret_cast<LlItem*>(plan_items + i * ll_item_bytes(topk));
    const turn::UnjudgedReads reads(config().masks_lost_peers);
    place_row(item,
              near ? row_of(*near, item)
                   : message_of(source).item(i, receiving_.item_bytes()) + receiving_.row_at());
  }
  // A peer that leaves this rank out may have stored other rows there meanwhile.
  const bool may_leave = near && source != context_.self() && context_.pipeline.here().has(source);
  if (may_leave && !context_.masks.still_in_step(*near)) {
    zero_rows(plan_items, count);
    context_.masks.mask(*near);
    context_.pipeline.lose(*near);
  }
  if (!receive_.source_ranges) return;
  const std::int64_t slots = slots_per_expert(config());
  for (std::size_t e = 0; e < scratch.next.size(); ++e) {
    const std::int64_t first = scratch.first[e] - static_cast<std::int64_t>(e) * slots;
    receive_.source_ranges.as<std::int64_t>()[e * at(config().ranks) + at(source)] =
        source_range(first, scratch.next[e] - scratch.first[e]);
  }
}

// Copies the row of an item to the next row of each of its experts, or to the one that stands for
// all of them.
void LlDispatch::place_row(LlItem& item, const std::byte* row) {
  const int topk = static_cast<int>(sent_.topk);
  const SlotTensor& out = receive_.recv_tokens;
  std::array<void*, kMaxTopk> places;
  int count = 0;
  const auto place = [&](std::int64_t at_row) -> std::int32_t {
    // Rows are behind the tensor's end only if the source's memory is damaged.
    if (at_row >= out.experts * out.slots) return -1;
    const std::int64_t expert = at_row / out.slots, slot = at_row % out.slots;
    places[at(count++)] = out.row(expert, slot);
    if (receive_.recv_scales) write_scales(expert, slot, row + out.row_bytes());
    return static_cast<std::int32_t>(at_row);
  };
  if (config().by_rank()) {
    const std::int32_t placed = place(rows_++);
    if (placed >= 0) write_choices(placed, item);
    std::fill_n(item.rows(), topk, -1);
    item.rows()[0] = placed;
  } else {
    for (int k = 0; k < topk; ++k) {
      const std::int32_t expert = item.rows()[k];
      if (expert < 0) continue;
      const std::int32_t placed = place(context_.scratch.next[at(expert)]++);
      item.rows()[k] = placed;
      if (placed < 0) continue;
      if (receive_.source_tokens) receive_.source_tokens.as<std::int32_t>()[placed] = item.token();
      if (receive_.recv_weights) receive_.recv_weights.as<float>()[placed] = item.weights(topk)[k];
    }
  }
  rows::copy_to_many(places.data(), count, row, out.row_bytes(), rows::Store::cached);
}

// The local experts and weights of a row that stands for all experts of its item.
void LlDispatch::write_choices(std::int64_t row, const LlItem& item) const {
  const int topk = static_cast<int>(sent_.topk);
  for (int k = 0; k < topk; ++k) {
    const std::int32_t expert = item.rows()[k];
    if (receive_.recv_topk_idx) set_number(receive_.recv_topk_idx, row * topk + k, expert);
    if (!receive_.recv_weights) continue;
    receive_.recv_weights.as<float>()[row * topk + k] = expert >= 0 ? item.weights(topk)[k] : 0.0f;
  }
}

// Fills what lies behind the rows: padding, and where rows stand for several experts, choices of
// nobody.
void LlDispatch::end_rows() {
  if (config().has_slots()) return;
  auto* const offsets = receive_.row_offsets.as<std::int64_t>();
  const std::int64_t room = receive_.recv_tokens.slots;
  if (!config().by_rank()) {
    offsets[config().local_experts] = rows_;
    for (std::size_t e = 0; e < context_.scratch.next.size(); ++e) {
      for (std::int64_t row = context_.scratch.next[e]; row < std::min(offsets[e + 1], room); ++row)
        zero_row(row);
    }
    return;
  }
  offsets[config().ranks] = rows_;
  const auto topk = static_cast<std::int64_t>(sent_.topk);
  for (std::int64_t i = rows_ * topk; i < room * topk; ++i) {
    if (receive_.recv_topk_idx) set_number(receive_.recv_topk_idx, i, -1);
    if (receive_.recv_weights) receive_.recv_weights.as<float>()[i] = 0.0f;
  }
}

// Null scales are zero.
void LlDispatch::write_scales(std::int64_t expert, std::int64_t slot,
                              const std::byte* scales) const {
  const SlotTensor& out = receive_.recv_scales;
  std::byte* to = out.row(expert, slot);
  const auto write = [scales](std::byte* at, std::uint64_t offset, std::uint64_t bytes) {
    if (scales == nullptr) {
      std::memset(at, 0, bytes);
    } else {
      std::memcpy(at, scales + offset, bytes);
    }
  };
  if (out.row_is_contiguous()) return write(to, 0, out.row_bytes());
  const std::size_t bytes = dtype_bytes(out.type);
  const std::int64_t step = out.col_stride * static_cast<std::int64_t>(bytes);
  for (std::int64_t c = 0; c < out.cols; ++c) write(to + c * step, at(c) * bytes, bytes);
}

// Where the row of a near source's item lies, its scales behind it.
const std::byte* LlDispatch::row_of(NearRank source, const LlItem& item) const {
  if (source == context_.self() && !own_staged_ && sent_.quantise == XD_EP_QUANTISE_NONE) {
    return send_.tokens.data + at(item.token()) * send_.tokens.row_bytes();
  }
  const int token = std::min(item.token(), config().max_tokens - 1);  // peers may say nonsense
  return context_.memory.row(source, context_.pipeline.next(), token);
}

// Rows of a source that have not come whole.
void LlDispatch::zero_rows(const std::byte* plan_items, std::uint64_t count) const {
  const int topk = static_cast<int>(sent_.topk);
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto& item = *reinterpret_cast<const LlItem*>(plan_items + i * ll_item_bytes(topk));
    for (int k = 0; k < topk; ++k) {
      if (item.rows()[k] >= 0) zero_row(item.rows()[k]);
    }
  }
}

void LlDispatch::zero_row(std::int64_t row) const {
  const SlotTensor& out = receive_.recv_tokens;
  const std::int64_t expert = row / out.slots, slot = row % out.slots;
  rows::zero(out.row(expert, slot), out.row_bytes(), rows::Store::cached);
  if (receive_.recv_scales) write_scales(expert, slot, nullptr);
  if (!receive_.recv_weights) return;
  const std::int64_t each = receive_.recv_weights.cols;
  std::fill_n(receive_.recv_weights.as<float>() + row * each, each, 0.0f);
}

// ---- Plan --------------------------------------------------------------------------------------

PlanHeader LlDispatch::header() const {
  PlanHeader header{};
  header.rank = context_.self();
  header.ranks = config().ranks;
  header.experts = config().experts;
  header.local_experts = config().local_experts;
  header.tokens = static_cast<std::int32_t>(sent_.tokens);
  header.topk = static_cast<std::int32_t>(sent_.topk);
  header.layout = ll_layout(config().receive);
  header.alignment = static_cast<std::int32_t>(config().alignment);
  header.overflow = XD_EP_OVERFLOW_ERROR;
  header.bad_id_rank = -1;
  header.overflow_rank = -1;
  header.expert_ranks = config().expert_tables.hash();
  header.hosts = context_.group.plan_terms().hosts;
  header.capacity = slots_per_expert(config());
  header.epoch = context_.pipeline.next();
  header.fingerprint = ll_fingerprint(context_.group.nonce(), header.epoch);
  return header;
}

// Up to where its items begin.
LlPlanMap LlDispatch::plan_map() const { return ll_map_of(header()); }

void LlDispatch::write_plan(std::int64_t items) const {
  const Pipeline& pipeline = context_.pipeline;
  PlanHeader header = this->header();
  const LlPlanMap map = ll_map_of(header);
  header.list_rows = items;
  const std::vector<std::int64_t>& counts = context_.scratch.counts;
  const std::int64_t pairs = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const std::int64_t rows = config().by_rank() ? rows_ : pairs;
  header.recv_rows = header.total_rows = config().has_slots() ? rows : rows_;
  context_.group.count_rows(rows, receive_.recv_tokens.row_bytes());
  for (int r = config().ranks - 1; r >= 0; --r) {
    const LlRecord& record = pipeline.records()[at(r)];
    if (!pipeline.here().has(r) || record.bad_ids == 0) continue;
    header.bad_ids += record.bad_ids;
    header.bad_id_rank = r;
  }
  const bool weighted = config().has_slots() && (sent_.flags & kWeighted) != 0;
  const LlPlanFacts facts{.weighted = weighted ? 1 : 0, .peer_items = 0};  // of plans on CUDA
  std::memcpy(receive_.plan, &header, sizeof(header));
  std::memcpy(receive_.plan + map.facts, &facts, sizeof(facts));
  std::ranges::copy(counts, reinterpret_cast<std::int32_t*>(receive_.plan + map.count));
  std::copy_n(context_.scratch.home_of(header.epoch, config()), sent_.tokens,
              reinterpret_cast<RankBits*>(receive_.plan + map.home));
  seal_ll_plan(receive_.plan);
}

void LlDispatch::write_counts() const {
  const std::span<const std::int64_t> counts = context_.scratch.counts;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    const auto expert = static_cast<std::int64_t>(e);
    receive_.counts.as<std::int32_t>()[e] = static_cast<std::int32_t>(counts[e]);
    const Tensor& load = receive_.expert_load;
    if (load) set_number(load, expert, number(load, expert) + counts[e]);
  }
}

LlOperationError LlDispatch::report() const {
  std::int64_t bad_ids = 0;
  int lowest = -1;
  for (int r = config().ranks - 1; r >= 0; --r) {
    if (!context_.pipeline.here().has(r)) continue;
    const std::int64_t of_rank = context_.pipeline.records()[at(r)].bad_ids;
    bad_ids += of_rank;
    if (of_rank > 0) lowest = r;
  }
  if (bad_ids == 0) return {};
  context_.group.count_bad_ids(bad_ids);
  return bad_expert_ids<LlFamily>(bad_ids, lowest, config());
}

}  // namespace xd::ep::cpu
