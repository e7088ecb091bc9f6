#include "low_latency.h"

namespace xdjax {
namespace {

using Numbers = LowLatency::Numbers;
using Operation = LowLatency::Operation;

// [N] int64 where XLA has [N,2] int32, as JAX has no 64-bit types unless it is told to.
DLTensor as_64_bits(DLTensor pairs) {
  pairs.dtype.bits = 64;
  pairs.ndim = 1;
  return pairs;
}

xd_status dispatch(const Numbers& numbers, xd_ll_group* group, const Operands& operands,
                   xd_stream stream) {
  auto args = args_of<xd_ll_dispatch_args>(operands);
  args.phase = numbers.phase;
  args.quantise = numbers.quantise;
  args.max_tokens = numbers.max_tokens;
  DLTensor offsets;
  if (args.row_offsets != nullptr) {
    offsets = as_64_bits(*args.row_offsets);
    args.row_offsets = &offsets;
  }
  return xd_ll_dispatch(group, &args, stream);
}

xd_status combine(const Numbers& numbers, xd_ll_group* group, const Operands& operands,
                  xd_stream stream) {
  auto args = args_of<xd_ll_combine_args>(operands);
  args.phase = numbers.phase;
  args.wire = numbers.wire;
  return xd_ll_combine(group, &args, stream);
}

xd_status mask_get(xd_ll_group* group, const Operands& operands, xd_stream stream) {
  return xd_ll_mask_get(group, operands.find("mask"), stream);
}

// The program is that of all ranks: the rank that is masked has nothing to do.
xd_status mask_set(const Numbers& numbers, xd_ll_group* group, const Operands& operands,
                   xd_stream stream) {
  const LowLatency::Mask& mask = numbers.mask;
  if (mask.rank == operands.rank()) return XD_SUCCESS;
  return xd_ll_mask_set(group, mask.rank, mask.masked ? 1 : 0, stream);
}

// The operation of the library whose turn a call takes on all ranks; none for calls that peers do
// not hear of.
std::optional<xd_ll_operation> turn_of(Operation operation) {
  switch (operation) {
    case Operation::dispatch:
      return XD_LL_DISPATCH;
    case Operation::combine:
      return XD_LL_COMBINE;
    case Operation::mask_get:
    case Operation::mask_set:
    case Operation::reset:
      break;
  }
  return std::nullopt;
}

}  // namespace

xd_status LowLatency::create(xd_comm* comm, const Config& config, Handle** group) {
  return xd_ll_group_create(comm, config.get(), group);
}

bool LowLatency::replayable(Operation operation) { return turn_of(operation).has_value(); }

std::optional<xd_status> LowLatency::fail(Operation operation, const Numbers& numbers,
                                          Handle* group, const char* text, xd_stream stream) {
  const std::optional<xd_ll_operation> turn = turn_of(operation);
  if (!turn || numbers.phase == XD_LL_PHASE_RECEIVE) return std::nullopt;
  return xd_ll_join_failed(group, *turn, text, stream);
}

xd_status LowLatency::run(Operation operation, const Numbers& numbers, Handle* group,
                          const Operands& operands, xd_stream stream) {
  switch (operation) {
    case Operation::dispatch:
      return dispatch(numbers, group, operands, stream);
    case Operation::combine:
      return combine(numbers, group, operands, stream);
    case Operation::mask_get:
      return mask_get(group, operands, stream);
    case Operation::mask_set:
      return mask_set(numbers, group, operands, stream);
    case Operation::reset:
      return xd_ll_reset(group, stream);
  }
  return XD_ERROR_INTERNAL;
}

}  // namespace xdjax
