#include "ep/slots/cpu/dispatch.h"

#include <algorithm>
#include <cstring>

#include "ep/plan/plan.h"
#include "ep/slots/cpu/remote/pipelines.h"
#include "ep/slots/family.h"
#include "ep/slots/placement.h"
#include "turn/unjudged_reads.h"

namespace xd::ep::cpu {
namespace {

// Adds to, or sets, the elements of an int32 or int64 output.
void add_number(const Tensor& out, std::int64_t i, std::int64_t value) {
  if (out.type == DType::i64) {
    out.as<std::int64_t>()[i] += value;
  } else {
    out.as<std::int32_t>()[i] += static_cast<std::int32_t>(value);
  }
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

// ---- Send --------------------------------------------------------------------------------------

// The ranks that get a token's row, with its item there.
struct LlDispatch::TokenRoute {
  struct Target {
    int rank;
    LlItem* item;
    std::byte* row;  // beside the item, where the rank is remote
  };
  std::array<Target, kMaxTopk> targets;
  int count = 0;
  RankBits home{};
  bool has_near_peer = false;

  std::span<Target> all() { return {targets.data(), at(count)}; }
  std::span<const Target> all() const { return {targets.data(), at(count)}; }
};

void LlDispatch::send(bool stage_own) {
  own_staged_ = stage_own;
  LlScratch& scratch = context_.scratch;
  Pipeline& pipeline = context_.pipeline;
  const Choices choices = read_choices(send_.topk_idx, config(), scratch.choices);
  std::ranges::fill(scratch.listed, 0);
  if (context_.remote != nullptr) open_messages();
  RankBits* const home = scratch.home_of(pipeline.sent(), config());
  for (std::int64_t t = 0; t < send_.tokens.rows; ++t) {
    const TokenRoute to = route(t, choices.experts.data() + t * choices.topk);
    home[t] = to.home;
    if (to.count > 0) send_row(t, to);
  }
  // A masked rank that stands still may yet read what it was sent before in the same place.
  for (const NearRank rank : context_.group.near()) {
    if (rank != context_.self() && !pipeline.company().has(rank)) continue;
    context_.memory.listed({rank, context_.self(), pipeline.sent()}) = scratch.listed[at(rank)];
  }
  LlRecord record = this->record();
  record.bad_ids = choices.counts[CountLayout{config().experts, config().ranks}.bad_ids()];
  record.mask = context_.masks.masked();
  rows::flush();
  pipeline.enter(record);
  pipeline.ring_peers();
  if (context_.remote != nullptr) send_messages();
}

LlRemoteRows LlDispatch::message_layout(std::uint64_t row_bytes, xd_ep_quantise quantise,
                                        int topk) const {
  if (const QuantiseFormat format = quantise_format(quantise)) {
    const std::uint64_t columns = row_bytes / dtype_bytes(DType::bf16);
    row_bytes = columns + format.scale_row_bytes(columns);
  }
  return {.topk = topk, .row_bytes = row_bytes};
}

void LlDispatch::open_messages() {
  for (const int rank : context_.remote->ranks()) {
    context_.scratch.bodies[at(rank)] = context_.remote->open(rank, LlRemotePipeline::Part::entry);
  }
}

void LlDispatch::send_messages() const {
  const LlRemoteRows layout = message_layout(send_.tokens.row_bytes(), send_.quantise,
                                             static_cast<int>(send_.topk_idx.cols));
  for (const int rank : context_.remote->ranks()) {
    const std::uint64_t items = context_.scratch.listed[at(rank)];
    context_.remote->send(rank, LlRemotePipeline::Part::entry, items, items * layout.item_bytes());
  }
}

// Writes the token's items.
LlDispatch::TokenRoute LlDispatch::route(std::int64_t token, const std::uint32_t* experts) const {
  const int topk = static_cast<int>(send_.topk_idx.cols);
  const float* weights =
      send_.topk_weights ? send_.topk_weights.as<float>() + token * topk : nullptr;
  const int self = context_.self();
  const RankBits& company = context_.pipeline.company();
  const LlRemoteRows layout = message_layout(send_.tokens.row_bytes(), send_.quantise, topk);
  TokenRoute to;
  for (int k = 0; k < topk; ++k) {
    if (experts[k] == Choices::kNone) continue;
    const ExpertPlace place = place_of(static_cast<int>(experts[k]), config().map());
    if (place.rank != self && !company.has(place.rank)) continue;
    int i = 0;
    while (i < to.count && to.targets[at(i)].rank != place.rank) ++i;
    TokenRoute::Target& target = to.targets[at(i)];
    if (i == to.count) {
      ++to.count;
      to.home.add(place.rank);
      const std::uint64_t number = context_.scratch.listed[at(place.rank)]++;
      if (const auto near = context_.group.comm().hosts().find_near(place.rank)) {
        const LlMemory::Cell cell{*near, self, context_.pipeline.sent()};
        target = {place.rank, &context_.memory.item(cell, number, topk), nullptr};
        to.has_near_peer = to.has_near_peer || place.rank != self;
      } else {
        std::byte* const item =
            context_.scratch.bodies[at(place.rank)] + number * layout.item_bytes();
        target = {place.rank, reinterpret_cast<LlItem*>(item), item + layout.row_at()};
      }
      target.item->source_token = LlItem::name(self, token);
      std::fill_n(target.item->rows(), topk, -1);
    }
    target.item->rows()[k] = place.local;
    if (weights != nullptr) target.item->weights(topk)[k] = weights[k];
  }
  for (const TokenRoute::Target& target : to.all()) {
    target.item->place = static_cast<std::uint32_t>(partial_place(target.rank, to.home, config()));
  }
  return to;
}

// The row goes into this rank's own memory, where near ranks read it, and beside remote ranks'
// items.
void LlDispatch::send_row(std::int64_t token, const TokenRoute& to) const {
  const QuantiseFormat format = quantise_format(send_.quantise);
  std::uint64_t bytes = send_.tokens.row_bytes();
  const std::byte* row = send_.tokens.data + at(token) * bytes;
  if (format) {
    const std::uint64_t columns = at(send_.tokens.cols);
    std::byte* const quantised = context_.scratch.quantised.data();
    rows::quantise_e4m3(format, quantised, quantised + columns, row, columns);
    row = quantised;
    bytes = columns + format.scale_row_bytes(columns);
  }
  const bool read_here = to.home.has(context_.self()) && (own_staged_ || format);
  if (to.has_near_peer || read_here) {
    rows::copy(context_.memory.row(context_.self(), context_.pipeline.sent(), token), row, bytes,
               kForPeers);
  }
  for (const TokenRoute::Target& target : to.all()) {
    if (target.row != nullptr) rows::copy(target.row, row, bytes, rows::Store::cached);
  }
}

// ---- Receive -----------------------------------------------------------------------------------

LlOperationError LlDispatch::receive(bool own_staged) {
  own_staged_ = own_staged;
  Pipeline& pipeline = context_.pipeline;
  sent_ = pipeline.own_record();
  // These bytes may have been a plan before; they are none from now on.
  std::memset(receive_.plan, 0, sizeof(PlanHeader));
  observe::WaitTimes times = wait_times(context_, receive_.wait_ns);
  pipeline.await(times);
  if (LlOperationError found = verdict(pipeline, context_.self())) return found;
  begin_delivery();
  std::byte* const items = receive_.plan + plan_map().items;
  std::int64_t count = 0;
  for (int source = 0; source < config().ranks; ++source) {
    count += deliver(source, items + at(count) * ll_item_bytes(static_cast<int>(sent_.topk)));
  }
  write_plan(count);
  write_counts();
  return report();
}

void LlDispatch::begin_delivery() { std::ranges::fill(context_.scratch.next, 0); }

// Places a source's rows, and writes its items into the plan; returns how many there are.
std::int64_t LlDispatch::deliver(int source, std::byte* plan_items) {
  LlScratch& scratch = context_.scratch;
  std::uint64_t count = 0;
  std::ranges::copy(scratch.next, scratch.first.begin());
  if (context_.pipeline.here().has(source)) {
    const auto near = context_.group.comm().hosts().find_near(source);
    count = near ? deliver_near(*near, plan_items) : deliver_remote(source, plan_items);
  }
  if (receive_.source_ranges) {
    for (std::size_t e = 0; e < scratch.next.size(); ++e) {
      receive_.source_ranges.as<std::int64_t>()[e * at(config().ranks) + at(source)] =
          source_range(scratch.first[e], scratch.next[e] - scratch.first[e]);
    }
  }
  return static_cast<std::int64_t>(count);
}

std::uint64_t LlDispatch::deliver_near(NearRank source, std::byte* plan_items) {
  const int topk = static_cast<int>(sent_.topk);
  const LlMemory::Cell cell = own_cell(source);
  const std::uint64_t count = std::min(context_.memory.listed(cell), at(config().max_tokens));
  for (std::uint64_t i = 0; i < count; ++i) {
    const LlItem& item = context_.memory.item(cell, i, topk);
    auto& kept = *reinterpret_cast<LlItem*>(plan_items + i * ll_item_bytes(topk));
    const turn::UnjudgedReads reads(config().masks_lost_peers);
    place_item(item, kept, row_of(source, item));
  }
  // A peer that leaves this rank out may have stored other rows there meanwhile.
  if (source != context_.self() && !context_.masks.still_in_step(source)) {
    zero_rows(plan_items, count);
    context_.masks.mask(source);
    context_.pipeline.lose(source);
  }
  return count;
}

// The message is here: pipeline.await() has returned.
std::uint64_t LlDispatch::deliver_remote(int source, std::byte* plan_items) {
  const LlRecord& record = context_.pipeline.records()[at(source)];
  const int topk = static_cast<int>(sent_.topk);
  const LlRemoteRows layout =
      message_layout(sent_.row_bytes, static_cast<xd_ep_quantise>(sent_.quantise), topk);
  const LlRemoteMessage& message =
      *context_.remote->find(source, LlRemotePipeline::Part::entry, context_.pipeline.next());
  const auto item_at = [&](std::uint64_t i) -> const LlItem& {
    return *reinterpret_cast<const LlItem*>(message.item(i, layout.item_bytes()));
  };
  context_.remote->judge([&] {
    message.require_items(std::min<std::uint64_t>(record.tokens, at(config().max_tokens)),
                          layout.item_bytes());
    if (record.tokens > at(config().max_tokens))
      message.refuse("its sender has more tokens than the group allows");
    for (std::uint64_t i = 0; i < message.header.items; ++i) {
      const LlItem& item = item_at(i);
      const bool ascends = i == 0 || item.token() > item_at(i - 1).token();
      if (item.source() != source || at(item.token()) >= record.tokens || !ascends)
        message.refuse("it has a token that its sender has not");
      if (!are_experts({item.rows(), at(topk)}, config().local_experts))
        message.refuse("it has an expert that this rank has not, or one twice");
    }
  });
  for (std::uint64_t i = 0; i < message.header.items; ++i) {
    auto& kept = *reinterpret_cast<LlItem*>(plan_items + i * ll_item_bytes(topk));
    place_item(item_at(i), kept, message.item(i, layout.item_bytes()) + layout.row_at());
  }
  return message.header.items;
}

// Copies the row of an item to the next slot of each of its experts.
void LlDispatch::place_item(const LlItem& from, LlItem& to, const std::byte* row) {
  const int topk = static_cast<int>(sent_.topk);
  const std::int64_t slots = slots_per_expert(config());
  to.source_token = from.source_token;
  to.place = from.place;
  std::array<void*, kMaxTopk> places;
  int count = 0;
  for (int k = 0; k < topk; ++k) {
    const std::int32_t expert = from.rows()[k];
    to.rows()[k] = -1;
    if (expert < 0 || expert >= config().local_experts) continue;
    const std::int64_t slot = context_.scratch.next[at(expert)]++;
    if (slot >= slots) continue;  // never, unless the source's memory is damaged
    to.rows()[k] = row_of_slot(expert, slot, slots);
    places[at(count++)] = receive_.recv_tokens.row(expert, slot);
    if (receive_.recv_scales) {
      write_scales(expert, slot, row + receive_.recv_tokens.row_bytes());
    }
    if (receive_.source_tokens) {
      receive_.source_tokens.as<std::int32_t>()[expert * slots + slot] = from.token();
    }
  }
  if ((sent_.flags & kWeighted) != 0) {
    std::copy_n(from.weights(topk), topk, to.weights(topk));
  } else {
    std::fill_n(to.weights(topk), topk, 0.0f);
  }
  rows::copy_to_many(places.data(), count, row, receive_.recv_tokens.row_bytes(),
                     rows::Store::cached);
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
  const std::int64_t slots = slots_per_expert(config());
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto& item = *reinterpret_cast<const LlItem*>(plan_items + i * ll_item_bytes(topk));
    for (int k = 0; k < topk; ++k) {
      const std::int32_t row = item.rows()[k];
      if (row < 0) continue;
      rows::zero(receive_.recv_tokens.row(row / slots, row % slots),
                 receive_.recv_tokens.row_bytes(), rows::Store::cached);
      if (receive_.recv_scales) write_scales(row / slots, row % slots, nullptr);
    }
  }
}

PlanHeader LlDispatch::header() const {
  PlanHeader header{};
  header.rank = context_.self();
  header.ranks = config().ranks;
  header.experts = config().experts;
  header.local_experts = config().local_experts;
  header.tokens = static_cast<std::int32_t>(sent_.tokens);
  header.topk = static_cast<std::int32_t>(sent_.topk);
  header.layout = kSlotsLayout;
  header.alignment = 1;
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
  for (const std::int64_t count : context_.scratch.next) header.recv_rows += count;
  header.total_rows = header.recv_rows;
  context_.group.count_rows(header.recv_rows, receive_.recv_tokens.row_bytes());
  for (int r = config().ranks - 1; r >= 0; --r) {
    const LlRecord& record = pipeline.records()[at(r)];
    if (!pipeline.here().has(r) || record.bad_ids == 0) continue;
    header.bad_ids += record.bad_ids;
    header.bad_id_rank = r;
  }
  const LlPlanFacts facts{.weighted = (sent_.flags & kWeighted) != 0 ? 1 : 0,
                          .peer_items = 0};  // of plans on CUDA
  std::memcpy(receive_.plan, &header, sizeof(header));
  std::memcpy(receive_.plan + map.facts, &facts, sizeof(facts));
  std::ranges::copy(context_.scratch.next,
                    reinterpret_cast<std::int32_t*>(receive_.plan + map.count));
  std::copy_n(context_.scratch.home_of(header.epoch, config()), sent_.tokens,
              reinterpret_cast<RankBits*>(receive_.plan + map.home));
  seal_ll_plan(receive_.plan);
}

void LlDispatch::write_counts() const {
  const std::span<const std::int64_t> counts = context_.scratch.next;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    receive_.counts.as<std::int32_t>()[e] = static_cast<std::int32_t>(counts[e]);
    if (receive_.expert_load) {
      add_number(receive_.expert_load, static_cast<std::int64_t>(e), counts[e]);
    }
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
