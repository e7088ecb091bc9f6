// The parameters of a group's kernels: plain data, passed by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/device/comm.h"
#include "ep/bulk/part_order.h"
#include "ep/bulk/wire.h"
#include "ep/plan/cuda/slot_table.h"
#include "ep/plan/plan_check.h"
#include "turn/device/group.h"

namespace xd::ep::cuda {

struct RemoteDevice;  // ep/bulk/cuda/remote/params.h

// Working state of a group: see turn::DeviceControl.
struct GroupState : turn::DeviceControl {
  std::uint32_t next_unit[2];  // next unit of work that warps take one by one
  std::uint64_t bad_ids;       // total over all plans made
  std::uint64_t dropped_rows;  // likewise
  const RemoteDevice* remote;  // in device memory; nullptr = all ranks are near
  PartOrder order;
};

// The facts that kernels tell about an operation error.
struct Findings {
  Fault fault;                              // INVALID_ARGUMENT: the mistake in this rank's plan
  std::int64_t bad_ids;                     // INVALID_ARGUMENT without either fault
  std::int64_t needed_rows, capacity_rows;  // OVERFLOW
  OrderFault order;                         // INVALID_ARGUMENT: the mistake in the call's part
};

// The report of operations to their host: see turn::DeviceReport.
struct Report : turn::DeviceReport<Record, Findings> {
  // Totals over all plans made, which only grow.
  std::uint64_t total_bad_ids, total_dropped_rows;
};

// A number by which ranks come in the order of sums: by ascending host, then by ascending rank.
constexpr std::uint32_t host_key(int host, int rank) {
  static_assert(kMaxRanks <= 1 << 16);
  return static_cast<std::uint32_t>(host) << 16 | static_cast<std::uint32_t>(rank);
}
constexpr std::uint32_t host_of_key(std::uint32_t key) { return key >> 16; }

// A group's tables in device memory: byte offsets.
struct GroupTables {
  std::uint64_t areas;      // [W] HeapRange
  std::uint64_t base;       // [W+1] uint32_t, of RowCodec
  std::uint64_t host_keys;  // [W] uint32_t: host_key()
  std::uint64_t physical_experts, physical_ranks,
      firsts;  // uint32_t, of ExpertMap, where it has tables
  std::uint64_t end;

  static constexpr GroupTables make(const ExpertMap& map) {
    const auto ranks = static_cast<std::uint64_t>(map.ranks);
    const auto experts = static_cast<std::uint64_t>(map.experts);
    LayoutCursor cursor;
    GroupTables tables{};
    tables.areas = cursor.add<HeapRange>(ranks);
    tables.base = cursor.add<std::uint32_t>(ranks + 1);
    tables.host_keys = cursor.add<std::uint32_t>(ranks);
    if (map.has_tables()) {
      tables.physical_experts = cursor.add<std::uint32_t>(experts);
      tables.physical_ranks = cursor.add<std::uint32_t>(experts + 1);
      tables.firsts = cursor.add<std::uint32_t>(ranks + 1);
    }
    tables.end = cursor.at;
    return tables;
  }
};

// The data that stays the same over a group's life.
struct GroupDevice : turn::DeviceGroup<GroupState, Report, GroupMap> {
  int experts, local_experts;
  int max_tokens;
  PlanTerms terms;
  Layout layout;
  bool drop, collapse, zero_tail, keeps_items;
  std::int64_t capacity;
  std::uint64_t capacities_hash;
  std::uint64_t plan_head_bytes;      // bytes of plans without parts in front of the codes
  std::uint32_t codec_experts;        // RowCodec
  const std::uint32_t* base;          // RowCodec: prefix sums of the capacities, in device memory
  int chunk_stride;                   // flags per source
  int kept_stride;                    // words per source
  std::uint64_t lists_stride;         // words per source
  std::uint64_t keeps_items_mask[2];  // by rank
  SlotTableDevice* slots;             // nullptr = no logical experts

  // A token's cells for partial sums. The plan's top-k decides, so that groups of another bound may
  // use the plan.
  constexpr int cells_per_token(int topk) const { return topk < ranks() ? topk : ranks(); }
  constexpr bool keeps_items_at(int rank) const {
    return (keeps_items_mask[rank / 64] >> (rank % 64) & 1) != 0;
  }
  constexpr bool some_keep_items() const {
    return (keeps_items_mask[0] | keeps_items_mask[1]) != 0;
  }
};

// Parameters are copied with every launch, and every block fetches them: tables are none.
static_assert(sizeof(GroupDevice) <= 512);

// One operation's turn: the parameters that all kernels share.
struct TurnParams : turn::DeviceTurnParams<GroupDevice, Record> {
  static constexpr int kMaxChecks = 8;

  const std::byte* plan;  // nullptr: no plan is read
  std::uint64_t plan_bytes;
  int part;  // 0 = the whole operation
  PartOrder::Staged staged;
  int num_checks;
  Check checks[kMaxChecks];  // tensors against the plan
};

// A receive tensor of this rank.
struct ReceiveRows {
  std::byte* data;    // nullptr = not given
  std::byte* staged;  // staging; nullptr = used where it lies
  std::int64_t rows;  // the tensor's
  std::uint64_t row_bytes;

  // The place where peers put a row.
  constexpr const std::byte* arrived(std::uint32_t row) const {
    return (staged != nullptr ? staged : data) + row * row_bytes;
  }
};

// Rows that are read, of any strides (in bytes).
struct StridedRows {
  const std::byte* data;    // nullptr = not given
  std::uint64_t row_bytes;  // packed
  std::int64_t row_stride, col_stride;
  std::uint32_t element;  // bytes
  bool bulk;              // one bulk copy can load a row

  constexpr const std::byte* row(std::int64_t i) const { return data + i * row_stride; }
};

// A tensor that is copied from packed rows in staging memory to the caller's tensor, of any
// strides, when all rows are there.
struct LateCopy {
  enum Tail : std::int32_t { left, zero, ones };  // bytes of what lies past the last row

  const std::byte* from;
  std::byte* to;
  std::int64_t rows;        // the tensor's
  std::uint64_t row_bytes;  // packed
  std::int64_t row_stride, col_stride;
  std::uint32_t element;
  Tail tail;
};

}  // namespace xd::ep::cuda
