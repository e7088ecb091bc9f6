// The common parts of the CPU executor's operations. Their steps are those of turn::HostOperation.
#pragma once

#include <array>

#include "base/math.h"
#include "ep/cpu/strided.h"
#include "ep/cpu/transfer.h"
#include "ep/records.h"

namespace xd::ep::cpu {

// The destination of rows of one kind in a rank's memory.
struct RowTarget {
  NearMemory rows;
  bool one_per_token;  // only a token's first row
};

// Stores one row to all its places: `target` gives the RowTarget of a rank.
template <class Target>
void store_row(const TokenRows& rows, const void* row, std::uint64_t bytes, rows::Store store,
               Target&& target) {
  std::array<void*, kMaxTopk> places;
  int count = 0;
  for (int i = 0; i < rows.count; ++i) {
    const RowTarget to = target(rows.list[at(i)].ref.rank);
    if (to.one_per_token && !rows.first_of_rank(i)) continue;
    places[at(count++)] = to.rows.address(at(rows.list[at(i)].ref.row) * bytes);
  }
  rows::copy_to_many(places.data(), count, row, bytes, store);
}

// The parts that operations on a plan have in common.
class PlanOperation {
 public:
  void announce() {}
  Setback obstacle() const { return overflow_of(plan_); }

 protected:
  PlanOperation(const Context& context, PlanBytes plan)
      : context_(context), plan_(open_plan(context, plan)) {}

  const Config& config() const { return context_.group.config(); }
  RankTensors& tensors(int rank) const { return context_.scratch.ranks[at(rank)]; }
  RowTarget row_target(int rank) const {
    return {tensors(rank).rows, tensors(rank).one_row_per_token};
  }
  RowTarget scale_target(int rank) const {
    return {tensors(rank).scales, tensors(rank).one_scale_per_token};
  }
  // Sends a token's row of scales, if there are scales, to all its places.
  void send_scales(const Tensor& scales, std::int64_t token, const TokenRows& rows) const {
    if (!scales) return;
    const std::byte* row = scales.data + at(token) * scales.row_bytes();
    if (!scales.packed()) {
      gather_row(scales, token, context_.scratch.scales.data());
      row = context_.scratch.scales.data();
    }
    store_row(rows, row, scales.row_bytes(), rows::Store::cached,
              [&](int r) { return scale_target(r); });
  }
  const GroupMap& own_map() const { return context_.lockstep.map_of(context_.group.self()); }
  ReceiveTensor receive_rows(const Tensor& tensor) const {
    return ReceiveTensor(context_, plan_, tensor, {own_map().rows, false});
  }
  // A receive tensor beside rows: scales, weights or indices, for which there is always staging.
  ReceiveTensor receive_beside(const Tensor& tensor, std::uint64_t staging_offset) const {
    return ReceiveTensor(context_, plan_, tensor, {staging_offset, true});
  }
  // Adds to the call's record the facts that it takes from the plan.
  Record plan_record(Record record) const {
    record.rows = static_cast<std::uint32_t>(plan_.header().recv_rows);
    record.fingerprint = plan_.header().fingerprint;
    return record;
  }

  Context context_;
  PlanView plan_;
};

}  // namespace xd::ep::cpu
