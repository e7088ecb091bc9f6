#include "ep/plan/plan_check.h"

#include "base/error.h"

namespace xd::ep {

PlanTerms terms_of(const PlanBinding& binding) {
  const Config& c = *binding.config;
  return {.rank = binding.rank,
          .ranks = c.ranks,
          .experts = c.experts,
          .layout = c.layout.id,
          .keeps_list = c.keeps.lists ? 1 : 0,
          .keeps_items = c.keeps.items ? 1 : 0,
          .overflow = c.overflow,
          .max_tokens = c.max_tokens,
          .max_topk = c.max_topk,
          .alignment = c.alignment,
          .capacity = c.capacity,
          .capacities = binding.capacities,
          .local_experts = c.local_experts,
          .expert_ranks = c.expert_tables.hash(),
          .hosts = binding.hosts};
}

std::string text_of(const Fault& fault, const PlanTerms& terms) {
  switch (fault.kind) {
    case PlanFault::none:
      break;
    case PlanFault::no_plan:
      return "plan: these bytes are no plan (or were never prepared)";
    case PlanFault::version:
      return concat("plan: has format version ", fault.got, ", expected ", fault.expected,
                    ": another version of the library has made it");
    case PlanFault::header:
      return "plan: its header is damaged";
    case PlanFault::cut_short:
      return concat("plan_bytes = ", fault.got, ", expected at least ", fault.expected,
                    ": the plan is cut short");
    case PlanFault::checksum:
      return "plan: its header is damaged (checksum)";
    case PlanFault::zones:
      return "plan: its zones are damaged";
    case PlanFault::family:
      return is_ll_layout(static_cast<int>(fault.got))
                 ? "plan: made by xd_ll_dispatch, expected one of xd_ep_prepare"
                 : "plan: made by xd_ep_prepare, expected one of xd_ll_dispatch";
    case PlanFault::binding: {
      const auto number = static_cast<std::size_t>(fault.which);
      const char* what = number < std::size(kBindingNames) ? kBindingNames[number] : "?";
      return concat("plan: made for ", what, " = ", fault.got, ", used with ", what, " = ",
                    fault.expected);
    }
    case PlanFault::capacities:
      return "plan: made for other receive capacities of the peers than this group's";
    case PlanFault::expert_ranks:
      return "plan: made for other expert_ranks than this group's";
    case PlanFault::hosts:
      return is_ll_layout(terms.layout)
                 ? "plan: made for ranks on other hosts than this communicator's (config.host)"
                 : "plan: made with other ranks than have entered this group's view, or on other "
                   "hosts than this communicator's (config.host): make it again by xd_ep_prepare";
    case PlanFault::too_large:
      return concat("plan: made for ", fault.got, " tokens and top-", fault.expected,
                    ", the group's bounds are ", terms.max_tokens, " and ", terms.max_topk);
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
    case PlanFault::part:
      return concat("part = ", fault.got, ", expected at most ", fault.expected,
                    ", the plan's parts (xd_ep_prepare_args.parts)");
  }
  return "plan: unknown fault";
}

void require_none(const Fault& fault, const PlanTerms& terms) {
  if (fault) throw Error(XD_ERROR_INVALID_ARGUMENT, text_of(fault, terms));
}

void require_plan_bytes(const void* plan, std::size_t bytes) {
  XD_REQUIRE(plan != nullptr, "plan = NULL");
  XD_REQUIRE(reinterpret_cast<std::uintptr_t>(plan) % 16 == 0, "plan is not 16-byte aligned");
  require_none(bytes >= sizeof(PlanHeader) ? Fault{}
                                           : Fault{.kind = PlanFault::cut_short,
                                                   .got = static_cast<std::int64_t>(bytes),
                                                   .expected = sizeof(PlanHeader)});
}

}  // namespace xd::ep
