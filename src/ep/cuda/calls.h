// From checked arguments to what kernels get.
#pragma once

#include <array>

#include "ep/cuda/kernels.h"
#include "ep/group.h"

namespace xd::ep::cuda {

struct GroupView {
  const Group* group;
  const GroupDevice* device;
  std::byte* memory;  // the group's, of this rank
};

// What an operation's turn is about.
struct Turning {
  Record record{};
  PlanBytes plan{};
  int num_checks = 0;
  std::array<Check, TurnParams::kMaxChecks> checks{};
};

struct DispatchStart {
  DispatchParams params{};  // all but turn and send_blocks
  Turning turning{};
  Tensor tokens;
};

struct CombineStart {
  CombineParams params{};  // all but turn and push_blocks
  Turning turning{};
  int tokens = 0;
  DType type = DType::bf16;
};

// All throw INVALID_ARGUMENT where a tensor lies outside symmetric memory and the group does not
// stage.
PrepareParams prepare_params(const PrepareCall& call, const GroupView& view);
DispatchStart dispatch_params(const DispatchCall& call, const GroupView& view);
DispatchStart dispatch_params(const CombineBwdCall& call, const GroupView& view);
CombineStart combine_params(const CombineCall& call, const GroupView& view);
CombineStart combine_params(const DispatchBwdCall& call, const GroupView& view);

}  // namespace xd::ep::cuda
