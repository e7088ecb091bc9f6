// The gated activation between an expert's two products, and its derivative: the arguments.
#pragma once

#include <crossdock/gated.h>

#include "base/tensor.h"
#include "ep/plan/wire_format.h"

namespace xd::ep {

struct GatedCall {
  xd_gated_activation activation;
  Tensor gate, up, weights, offsets;
  // With offsets: rows begin at offsets[first_expert], or at 0 if that is 0, and end at
  // offsets[end_expert].
  std::int32_t first_expert = 0, end_expert = 0;
  Tensor out, out_scales;                             // of xd_gated
  WireFormat codes;                                   // of out, if it is fp8
  Tensor grad_out, grad_gate, grad_up, grad_weights;  // of xd_gated_bwd

  bool backward() const { return static_cast<bool>(grad_out); }
};

// Each throws INVALID_ARGUMENT.
GatedCall read_gated(const xd_gated_args* args, DLDevice device);
GatedCall read_gated(const xd_gated_bwd_args* args, DLDevice device);

}  // namespace xd::ep
