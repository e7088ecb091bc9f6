#include "ep/slots/cpu/dispatch.h"

#include <algorithm>

#include "ep/plan/cpu/strided.h"
#include "ep/plan/plan.h"
#include "ep/slots/cpu/remote/pipelines.h"
#include "ep/slots/family.h"
#include "ep/slots/placement.h"

namespace xd::ep::cpu {

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
  sending_ = message_layout(this->record());
  LlScratch& scratch = context_.scratch;
  Pipeline& pipeline = context_.pipeline;
  const Choices choices = read_choices(
      send_.topk_idx, config(), {context_.group.slot_table(), send_.replica_hint}, scratch.choices);
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
  context_.group.count_unplaced(choices.unplaced);
  LlRecord record = this->record();
  record.bad_ids = choices.counts[CountLayout{config().experts, config().ranks}.bad_ids()];
  record.fingerprint = context_.group.slot_table().hash();
  record.mask = context_.masks.masked();
  rows::flush();
  pipeline.enter(record);
  pipeline.ring_peers();
  if (context_.remote != nullptr) send_messages();
}

LlRemoteRows LlDispatch::message_layout(const LlRecord& record) {
  return {.topk = static_cast<int>(record.topk),
          .row_bytes = sent_row_bytes(record) + sent_scale_bytes(record)};
}

void LlDispatch::open_messages() {
  context_.remote->for_company([this](int rank) {
    context_.scratch.bodies[at(rank)] = context_.remote->open(rank, LlRemotePipeline::Part::entry);
  });
}

void LlDispatch::send_messages() const {
  context_.remote->for_company([this](int rank) {
    const std::uint64_t items = context_.scratch.listed[at(rank)];
    context_.remote->send(rank, LlRemotePipeline::Part::entry, items,
                          items * sending_.item_bytes());
  });
}

// Writes the token's items.
LlDispatch::TokenRoute LlDispatch::route(std::int64_t token, const std::uint32_t* experts) const {
  const int topk = static_cast<int>(send_.topk_idx.cols);
  const float* weights =
      send_.topk_weights ? send_.topk_weights.as<float>() + token * topk : nullptr;
  const int self = context_.self();
  const RankBits& company = context_.pipeline.company();
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
            context_.scratch.bodies[at(place.rank)] + number * sending_.item_bytes();
        target = {place.rank, reinterpret_cast<LlItem*>(item), item + sending_.row_at()};
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
// items; its scales behind it.
void LlDispatch::send_row(std::int64_t token, const TokenRoute& to) const {
  const QuantiseFormat format = quantise_format(send_.quantise);
  std::uint64_t bytes = send_.tokens.row_bytes();
  const std::byte* row = send_.tokens.data + at(token) * bytes;
  std::byte* const scratch = context_.scratch.row.data();
  if (format) {
    const std::uint64_t columns = at(send_.tokens.cols);
    rows::quantise_e4m3(format, scratch, scratch + columns, row, columns);
  } else if (send_.scales) {
    rows::copy(scratch, row, bytes, rows::Store::cached);
    gather_row(send_.scales, token, scratch + bytes);
  }
  const bool has_scales = format || send_.scales;
  if (has_scales) {
    row = scratch;
    bytes = sending_.row_bytes;
  }
  const bool read_here = to.home.has(context_.self()) && (own_staged_ || has_scales);
  if (to.has_near_peer || read_here) {
    rows::copy(context_.memory.row(context_.self(), context_.pipeline.sent(), token), row, bytes,
               kForPeers);
  }
  for (const TokenRoute::Target& target : to.all()) {
    if (target.row != nullptr) rows::copy(target.row, row, bytes, rows::Store::cached);
  }
}

}  // namespace xd::ep::cpu
