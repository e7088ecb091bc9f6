// The common parts of the CPU executor's operations. Their steps are those of turn::HostOperation.
#pragma once

#include <array>
#include <cstring>
#include <span>

#include "base/math.h"
#include "ep/bulk/cpu/remote/rows.h"
#include "ep/bulk/cpu/transfer.h"
#include "ep/bulk/records.h"
#include "ep/plan/cpu/strided.h"

namespace xd::ep::cpu {

// The destination of rows of one kind in a rank's memory.
struct RowTarget {
  NearMemory rows;
  bool one_per_token;  // only a token's first row
};

// Stores one row to all its places in the scope: `target` gives the RowTarget of a rank.
template <class Target>
void store_row(const TokenRows& rows, const Scope& scope, const void* row, std::uint64_t bytes,
               rows::Store store, Target&& target) {
  std::array<void*, kMaxTopk> places;
  int count = 0;
  for (int i = 0; i < rows.count; ++i) {
    const RowTarget to = target(rows.list[at(i)].ref.rank);
    if (!rows.is_due(i, to.one_per_token, scope)) continue;
    places[at(count++)] = to.rows.address(at(rows.list[at(i)].ref.row) * bytes);
  }
  rows::copy_to_many(places.data(), count, row, bytes, store);
}

// The data that a token, of this rank or of one on another machine, brings to its rows.
struct TokenData {
  const std::uint32_t* codes = nullptr;
  const std::byte* row = nullptr;
  const std::byte* scales = nullptr;  // packed; null = none
  const float* weights = nullptr;     // one per choice; null = none

  void pack(const RowsLayout& layout, std::byte* item) const {
    std::memcpy(item, codes, layout.weights_at());
    if (layout.weights)
      std::memcpy(item + layout.weights_at(), weights, at(layout.topk) * sizeof(float));
    std::memcpy(item + layout.row_at(), row, layout.row_bytes);
    if (layout.scale_bytes > 0) std::memcpy(item + layout.scales_at(), scales, layout.scale_bytes);
  }
  static TokenData unpack(const RowsLayout& layout, const std::byte* item) {
    return {.codes = reinterpret_cast<const std::uint32_t*>(item),
            .row = item + layout.row_at(),
            .scales = layout.scale_bytes > 0 ? item + layout.scales_at() : nullptr,
            .weights = layout.weights ? reinterpret_cast<const float*>(item + layout.weights_at())
                                      : nullptr};
  }
};

// The parts that operations on a plan have in common.
class PlanOperation {
 public:
  void announce() {}
  OperationError obstacle() const { return overflow_of(plan_); }
  // Rows of an operation in parts count once.
  bool counts_rows() const { return part().begins(); }

 protected:
  // Throws INVALID_ARGUMENT where the plan has no such part.
  PlanOperation(const Context& context, PlanBytes plan, const Portion& portion)
      : context_(context), plan_(open_plan(context, plan)) {
    step_.part = call_part(plan_, portion);
  }
  // Constructors end with it. `record`: that of the call. Throws INVALID_ARGUMENT where the group
  // expects another part, or other tensors.
  void require_order(const Record& record, PartOrder::Staged staged) {
    const bool has_rows = plan_.header().recv_rows > 0;
    step_.record = record;
    step_.record.rows = static_cast<std::uint32_t>(plan_.header().recv_rows);
    step_.record.fingerprint = plan_.header().fingerprint;
    step_.staged = {has_rows && staged.rows, has_rows && staged.scales};
    if (!plan_.refused()) context_.order.require(step_);
  }
  void advance() const { context_.order.advance(step_); }

  const CallPart& part() const { return step_.part; }
  // The rows of the call's part. `works_there`: as scope_of() has it.
  Scope scope(bool works_there) const {
    return scope_of(part(), context_.lockstep.remote() != nullptr, works_there);
  }

  const Config& config() const { return context_.group.config(); }
  RankTensors& tensors(int rank) const { return context_.scratch.ranks[at(rank)]; }
  RowTarget row_target(int rank) const {
    return {tensors(rank).rows, tensors(rank).one_row_per_token};
  }
  RowTarget scale_target(int rank) const {
    return {tensors(rank).scales, tensors(rank).one_scale_per_token};
  }
  // A token's row of scales, packed; null if there are no scales.
  const std::byte* read_scales(const Tensor& scales, std::int64_t token) const {
    if (!scales) return nullptr;
    if (scales.packed()) return scales.data + at(token) * scales.row_bytes();
    gather_row(scales, token, context_.scratch.scales.data());
    return context_.scratch.scales.data();
  }
  void store_scales(const std::byte* scales, std::uint64_t bytes, const TokenRows& rows) const {
    if (scales == nullptr) return;
    store_row(rows, moved(), scales, bytes, rows::Store::cached,
              [&](int r) { return scale_target(r); });
  }

  // The scope of operations that store rows.
  Scope moved() const { return scope(part().begins()); }

  // Brings every token's data to its rows in the scope: `read` gives a token's data, and
  // deliver(data, rows) stores them in near ranks' memory, also for tokens of other machines whose
  // relay this is.
  template <class Read, class Deliver>
  void spread(const RowsLayout& layout, Read&& read, Deliver&& deliver) const {
    const Scope scope = moved();
    if (scope.empty) return;
    if (context_.lockstep.remote() != nullptr) return spread_remote(layout, read, deliver);
    TokenRows rows;
    for (std::int64_t t = 0; t < plan_.header().tokens; ++t) {
      rows.gather(context_, plan_.codes(t), plan_.header().topk);
      if (scope.part != 0) rows.find_parts(plan_);
      if (rows.is_any_due(scope)) deliver(read(t), rows);
    }
    rows::flush();
  }
  // Constructors of operations that spread tokens end with it.
  void list_rows(const RowsLayout& layout) const {
    RemoteSide* const side = context_.lockstep.remote();
    if (side == nullptr || plan_.refused() || moved().empty) return;
    side->items().list(context_, plan_, RemotePlace::machine,
                       side->chunk_room() / layout.item_bytes());
  }
  const GroupMap& own_map() const { return context_.lockstep.map_of(context_.group.self()); }
  ReceiveTensor receive_rows(const Tensor& tensor) const {
    return ReceiveTensor(context_, plan_, tensor, {own_map().rows, false});
  }
  // A receive tensor beside rows: scales, weights or indices, for which there is always staging.
  ReceiveTensor receive_beside(const Tensor& tensor, std::uint64_t staging_offset) const {
    return ReceiveTensor(context_, plan_, tensor, {staging_offset, true});
  }
  // The call's record, but for the places of tensors.
  Record plan_record() const {
    Record record = step_.record;
    record.fingerprint |= static_cast<std::uint64_t>(part().part);
    return record;
  }

  Context context_;
  PlanView plan_;
  PartOrder::Step step_;

 private:
  template <class Read, class Deliver>
  void spread_remote(const RowsLayout& layout, Read&& read, Deliver&& deliver) const;
};

template <class Read, class Deliver>
void PlanOperation::spread_remote(const RowsLayout& layout, Read&& read, Deliver&& deliver) const {
  RemoteSide& side = *context_.lockstep.remote();
  const int topk = plan_.header().topk;
  const auto fill = [&](int relay, std::uint32_t chunk, std::byte* room) {
    RemoteHands::Filled filled;
    for (const RequestItem& item : side.items().of(relay, chunk)) {
      read(item.token).pack(layout, room + filled.bytes);
      filled.bytes += layout.item_bytes();
      ++filled.items;
    }
    return filled;
  };
  const auto take = [&](const RemoteHeader& header, std::span<const std::byte> items) {
    require_items(header, items, layout.item_bytes());
    TokenRows rows;
    for (std::size_t i = 0; i < items.size(); i += layout.item_bytes()) {
      const TokenData data = TokenData::unpack(layout, items.data() + i);
      rows.gather(context_, data.codes, topk);
      if (rows.count > 0) deliver(data, rows);
    }
  };
  const RemoteRows remote(side, RemoteKind::rows, side.items().chunks, fill, take);
  TokenRows rows;
  std::size_t near = side.chunk_room();  // bytes since other machines were served
  for (std::int64_t t = 0; t < plan_.header().tokens; ++t) {
    if (near >= side.chunk_room()) {
      side.poll();
      near = 0;
    }
    rows.gather(context_, plan_.codes(t), topk);
    if (rows.count > 0) deliver(read(t), rows);
    near += at(rows.count) * layout.row_bytes;
  }
  side.finish();
  rows::flush();
}

}  // namespace xd::ep::cpu
