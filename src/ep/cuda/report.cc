#include "ep/cuda/report.h"

#include <atomic>
#include <iterator>

#include "base/error.h"
#include "base/math.h"
#include "ep/family.h"

namespace xd::ep::cuda {
namespace {

std::string text_of(const Fault& fault, const Config& config) {
  switch (fault.kind) {
    case PlanFault::none:
      break;
    case PlanFault::no_plan:
      return "plan: these bytes are no plan (or were never prepared)";
    case PlanFault::version:
      return concat("plan has format version ", fault.got, ", expected ", fault.expected);
    case PlanFault::header:
      return "plan: its header is damaged";
    case PlanFault::cut_short:
      return concat("plan_bytes = ", fault.got, ", expected at least ", fault.expected,
                    ": the plan is cut short");
    case PlanFault::checksum:
      return "plan: its header is damaged (checksum)";
    case PlanFault::zones:
      return "plan: its zones are damaged";
    case PlanFault::binding: {
      const auto number = static_cast<std::size_t>(fault.which);
      const char* what = number < std::size(kBindingNames) ? kBindingNames[number] : "?";
      return concat("plan: made for ", what, " = ", fault.got, ", used with ", what, " = ",
                    fault.expected);
    }
    case PlanFault::capacities:
      return "plan: made for other receive capacities of the peers than this group's";
    case PlanFault::too_large:
      return concat("plan: made for ", fault.got, " tokens and top-", fault.expected,
                    ", the group's bounds are ", config.max_tokens, " and ", config.max_topk);
    case PlanFault::alignment:
      return concat("plan: made for alignment = ", fault.got, ", the group's bound is ",
                    fault.expected);
    case PlanFault::tensor_rows:
      return concat(fault.name, ": has ", fault.got, " rows, expected at least ", fault.expected,
                    ", which the plan brings to this rank");
    case PlanFault::tokens:
      return concat(fault.name, ": has ", fault.got, " rows, expected ", fault.expected,
                    " (tokens of the plan)");
    case PlanFault::topk:
      return concat(fault.name, ": has ", fault.got, " columns, expected ", fault.expected,
                    " (top-k of the plan)");
  }
  return "plan: unknown fault";
}

Setback setback_of(const Report& report, const Group& group) {
  const Config& config = group.config();
  switch (report.status) {
    case XD_ERROR_OVERFLOW:
      return overflow({.rank = report.rank,
                       .needed_rows = report.findings.needed_rows,
                       .capacity_rows = report.findings.capacity_rows});
    case XD_ERROR_INVALID_ARGUMENT:
      if (report.findings.fault.kind == PlanFault::none) {
        return bad_expert_ids(report.findings.bad_ids, report.rank, config.experts);
      }
      return {.status = XD_ERROR_INVALID_ARGUMENT,
              .text = text_of(report.findings.fault, config),
              .rank = group.rank()};
    default: {
      const std::span<const Record> records(report.record, at(config.ranks));
      if (Setback found = turn::disagreement<Family>(records, group.rank())) return found;
      return {.status = XD_ERROR_MISMATCH,
              .text = concat("rank ", report.rank,
                             " does not find a tensor that some rank offers: it lies outside that "
                             "rank's shared memory, or its registration has ended"),
              .rank = report.rank};
    }
  }
}

}  // namespace

Setback ReportReader::look(Report& report, const Group& group) {
  // Acquire: the error was complete before it was counted.
  const std::uint32_t written = std::atomic_ref(report.written).load(std::memory_order_acquire);
  return written != 0 ? setback_of(report, group) : Setback();
}

void ReportReader::collect(Report& report, Group& group) {
  // Acquire: the error was complete before it was counted.
  const std::uint32_t written = std::atomic_ref(report.written).load(std::memory_order_acquire);
  if (written != report.taken) {
    const Setback setback = setback_of(report, group);
    group.remember(setback, report.operation, report.epoch);
    // Release: kernels write the next error only where this one has been read.
    std::atomic_ref(report.taken).store(written, std::memory_order_release);
  }
  const std::uint64_t bad = std::atomic_ref(report.total_bad_ids).load(std::memory_order_relaxed);
  const std::uint64_t dropped =
      std::atomic_ref(report.total_dropped_rows).load(std::memory_order_relaxed);
  group.count_losses(static_cast<std::int64_t>(bad - bad_ids_),
                     static_cast<std::int64_t>(dropped - dropped_rows_));
  bad_ids_ = bad;
  dropped_rows_ = dropped;
}

}  // namespace xd::ep::cuda
