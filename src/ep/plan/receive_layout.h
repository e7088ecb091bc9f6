// The layouts of receive tensors, as properties. Code asks for the property that it depends on, so
// a further layout is a further entry here.
#pragma once

#include <crossdock/ep.h>
#include <crossdock/low_latency.h>

namespace xd::ep {

struct Layout {
  int id;            // an xd_ep_layout
  const char* name;  // in texts of errors; the host's memory

  // A token has a row for each of its experts at a rank, and the owner knows which rows are one
  // token's. Otherwise it has one row there, which stands for all of them.
  bool row_per_expert;
  // Rows lie in zones, one for each local expert, which follow one another, padded to the plan's
  // alignment.
  bool has_zones;
  // Beside a row lie the token's K choices there: local experts and weights. Otherwise it has one
  // weight, and its place tells its expert.
  bool choices_beside_rows;

  // All false where `id` is no layout: plans come from callers.
  static constexpr Layout of(int id);

  // Values per receive row in a tensor of weights, and its dimensions.
  constexpr int weights_per_row(int topk) const { return choices_beside_rows ? topk : 1; }
  constexpr int weights_ndim() const { return choices_beside_rows ? 2 : 1; }
  // Codes per receive row: choices that share a row differ in the local expert (see RowCodec).
  constexpr int codes_per_row(int most_local_experts) const {
    return row_per_expert ? 1 : most_local_experts;
  }
};

inline constexpr int kNumLayouts = 2;
// In plans of low latency, in the place of an xd_ep_layout: this and what the group's xd_ll_receive
// adds to it.
inline constexpr int kSlotsLayout = 2;
constexpr int ll_layout(int receive) { return kSlotsLayout + receive; }
constexpr bool is_ll_layout(int id) {
  return id >= ll_layout(XD_LL_SLOTS) && id <= ll_layout(XD_LL_BY_RANK);
}

// A function and not a table, as kernels cannot reach tables of the host.
constexpr Layout Layout::of(int id) {
  switch (id) {
    case XD_EP_EXPERT_MAJOR:
      return {.id = id,
              .name = "EXPERT_MAJOR",
              .row_per_expert = true,
              .has_zones = true,
              .choices_beside_rows = false};
    case XD_EP_RANK_MAJOR:
      return {.id = id,
              .name = "RANK_MAJOR",
              .row_per_expert = false,
              .has_zones = false,
              .choices_beside_rows = true};
    default:
      return {.id = id,
              .name = "unknown",
              .row_per_expert = false,
              .has_zones = false,
              .choices_beside_rows = false};
  }
}

}  // namespace xd::ep
