// Makes kernels' parameters from checked arguments.
#pragma once

#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/group.h"

namespace xd::ep::cuda {

struct GroupView {
  const Group& group;
  const GroupDevice& device;
  std::byte* memory;  // the group's memory on this rank
};

// All parameters but the number of the launch and send_blocks.
struct DispatchStart {
  DispatchParams params{};
  Tensor tokens;
};

// All parameters but the number of the launch and push_blocks.
struct CombineStart {
  WireCombineParams params{};
  bool wire = false;  // other than SAME
  int tokens = 0;
  DType type = DType::bf16;
};

BareParams bare_params(const Record& record, const GroupView& view);

// All throw INVALID_ARGUMENT where a tensor lies outside symmetric memory and the group does not
// stage. The caller fills in the number of the launch, and prepare's working memory.
PrepareParams prepare_params(const PrepareCall& call, const GroupView& view);
DispatchStart dispatch_params(const DispatchCall& call, const GroupView& view);
DispatchStart dispatch_params(const CombineBwdCall& call, const GroupView& view);
CombineStart combine_params(const CombineCall& call, const GroupView& view);
CombineStart combine_params(const DispatchBwdCall& call, const GroupView& view);

}  // namespace xd::ep::cuda
