#include "ep/bulk/cuda/report.h"

#include <atomic>
#include <span>

#include "base/error.h"
#include "base/math.h"
#include "ep/bulk/family.h"
#include "turn/disagreement.h"

namespace xd::ep::cuda {

OperationError operation_error_of(const Report& report, const Group& group) {
  const Config& config = group.config();
  switch (report.status) {
    case XD_ERROR_OVERFLOW:
      return overflow({.rank = report.rank,
                       .needed_rows = report.findings.needed_rows,
                       .capacity_rows = report.findings.capacity_rows});
    case XD_ERROR_INVALID_ARGUMENT:
      if (report.findings.order) {
        return {.status = XD_ERROR_INVALID_ARGUMENT,
                .text = text_of(report.findings.order),
                .rank = group.rank()};
      }
      if (!report.findings.fault) {
        return bad_expert_ids<Family>(report.findings.bad_ids, report.rank, config);
      }
      return {.status = XD_ERROR_INVALID_ARGUMENT,
              .text = text_of(report.findings.fault, terms_of(group.plan_binding())),
              .rank = group.rank()};
    default: {
      const std::span<const Record> records(report.record, at(config.ranks));
      if (OperationError found = turn::disagreement<Family>(records, group.rank())) return found;
      return {.status = XD_ERROR_MISMATCH,
              .text = concat("rank ", report.rank,
                             " does not find a tensor that some rank offers: it lies outside that "
                             "rank's shared memory, or its registration has ended"),
              .rank = report.rank};
    }
  }
}

void LossCounter::collect(Report& report, const DeviceSlotTable& slots, Group& group) {
  const std::lock_guard lock(mutex_);
  const std::int64_t unplaced = slots.unplaced();
  const std::uint64_t bad = std::atomic_ref(report.total_bad_ids).load(std::memory_order_relaxed);
  const std::uint64_t dropped =
      std::atomic_ref(report.total_dropped_rows).load(std::memory_order_relaxed);
  group.count_bad_ids(static_cast<std::int64_t>(bad - bad_ids_));
  group.count_dropped_rows(static_cast<std::int64_t>(dropped - dropped_rows_));
  group.count_unplaced(unplaced - unplaced_);
  bad_ids_ = bad;
  dropped_rows_ = dropped;
  unplaced_ = unplaced;
}

}  // namespace xd::ep::cuda
