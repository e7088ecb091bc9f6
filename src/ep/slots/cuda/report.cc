#include "ep/slots/cuda/report.h"

#include <span>

#include "base/error.h"
#include "base/math.h"
#include "ep/plan/wire_format.h"
#include "ep/slots/family.h"
#include "turn/disagreement.h"

namespace xd::ep::cuda {
namespace {

std::string text_of_fault(const LlFindings& f, const LlGroup& group) {
  switch (f.kind) {
    case LlFault::plan:
      return text_of(f.fault, group.plan_terms());
    case LlFault::no_send:
      return "phase = XD_LL_PHASE_RECEIVE, expected a send half before it";
    case LlFault::both_between:
      return concat("phase = XD_LL_PHASE_BOTH, expected XD_LL_PHASE_SEND while ", f.got,
                    " operations are between their halves");
    case LlFault::not_as_sent:
      return concat("receive half: rows have ", f.got,
                    " bytes, expected type and size of the rows, and scales beside them, "
                    "that the send half has sent, ",
                    f.expected, " bytes");
    case LlFault::tokens:
      return concat("out or topk_weights has ", f.got, " rows, expected the plan's ", f.expected,
                    " tokens");
    case LlFault::topk:
      return concat("topk_weights has ", f.got, " columns, expected the plan's top-k ", f.expected);
    case LlFault::rows:
      return concat("expert_out: has ", f.got, " rows, expected at least ", f.expected,
                    ", which the plan brings to this rank");
    case LlFault::form_not_as_sent:
      return "receive half: max_tokens, recv_weights (given or not) or the columns of "
             "recv_weights and recv_topk_idx are not those of the send half";
    case LlFault::wire_not_as_sent: {
      const auto name = [](std::int64_t wire) { return wire_name(static_cast<xd_ep_wire>(wire)); };
      return concat("wire = XD_EP_WIRE_", name(f.got), ", expected XD_EP_WIRE_", name(f.expected),
                    ", as in the send half");
    }
    case LlFault::not_clean:
      return "XD_LL_VERIFY: words of an operation that has been taken are not free";
    case LlFault::none:
    case LlFault::busy:
      break;
  }
  return {};
}

LlOperationError busy(const LlFindings& findings, const LlGroup& group) {
  return {.status = XD_ERROR_BUSY,
          .text = concat(findings.got, " operations are between their halves, expected at most ",
                         "in_flight = ", group.config().in_flight,
                         " with this one; peers do not hear of this call"),
          .rank = group.rank()};
}

}  // namespace

LlOperationError operation_error_of(const LlReport& report, const LlGroup& group) {
  const auto status = static_cast<xd_status>(report.status);
  switch (report.status) {
    case XD_ERROR_PEER_LOST: {
      RankBits lost{};
      if (report.rank >= 0) lost.add(report.rank);
      return lost_peers({lost, report.masked, report.masked_by});
    }
    case XD_ERROR_BUSY:
      return busy(report.findings, group);
    case XD_ERROR_MISMATCH: {
      const std::span<const LlRecord> records(report.record, at(group.config().ranks));
      return turn::disagreement<LlFamily, LlRecord>(
          records, group.rank(), [&](int r) { return records[at(r)].call.operation != 0; });
    }
    default:
      if (report.operation == XD_LL_SET_PLACEMENT &&
          report.findings.kind == LlFault::both_between) {
        return busy_with_halves(report.findings.got, group.rank());
      }
      if (report.findings.kind == LlFault::none) {
        return bad_expert_ids<LlFamily>(report.findings.bad_ids, report.rank, group.config());
      }
      return {
          .status = status, .text = text_of_fault(report.findings, group), .rank = group.rank()};
  }
}

}  // namespace xd::ep::cuda
