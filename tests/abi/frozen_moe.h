/* The same of crossdock/moe.h. */
#ifndef CROSSDOCK_TESTS_ABI_FROZEN_MOE_H_
#define CROSSDOCK_TESTS_ABI_FROZEN_MOE_H_

#include "abi/frozen.h"

FROZEN_SIZE(xd_moe_forward_args, 128);
FROZEN_FIELD(xd_moe_forward_args, struct_size, 0);
FROZEN_FIELD(xd_moe_forward_args, plan, 8);
FROZEN_FIELD(xd_moe_forward_args, plan_bytes, 16);
FROZEN_FIELD(xd_moe_forward_args, offsets, 24);
FROZEN_FIELD(xd_moe_forward_args, tokens, 32);
FROZEN_FIELD(xd_moe_forward_args, topk_weights, 40);
FROZEN_FIELD(xd_moe_forward_args, w_in, 48);
FROZEN_FIELD(xd_moe_forward_args, w_out, 56);
FROZEN_FIELD(xd_moe_forward_args, recv_tokens, 64);
FROZEN_FIELD(xd_moe_forward_args, recv_weights, 72);
FROZEN_FIELD(xd_moe_forward_args, inner, 80);
FROZEN_FIELD(xd_moe_forward_args, activated, 88);
FROZEN_FIELD(xd_moe_forward_args, expert_out, 96);
FROZEN_FIELD(xd_moe_forward_args, out, 104);
FROZEN_FIELD(xd_moe_forward_args, activation, 112);
FROZEN_FIELD(xd_moe_forward_args, parts, 116);
FROZEN_FIELD(xd_moe_forward_args, num_sms, 120);
FROZEN_FIELD(xd_moe_forward_args, reserved, 124);

FROZEN_SIZE(xd_moe_backward_args, 184);
FROZEN_FIELD(xd_moe_backward_args, struct_size, 0);
FROZEN_FIELD(xd_moe_backward_args, plan, 8);
FROZEN_FIELD(xd_moe_backward_args, plan_bytes, 16);
FROZEN_FIELD(xd_moe_backward_args, offsets, 24);
FROZEN_FIELD(xd_moe_backward_args, grad_out, 32);
FROZEN_FIELD(xd_moe_backward_args, w_in, 40);
FROZEN_FIELD(xd_moe_backward_args, w_out, 48);
FROZEN_FIELD(xd_moe_backward_args, recv_tokens, 56);
FROZEN_FIELD(xd_moe_backward_args, recv_weights, 64);
FROZEN_FIELD(xd_moe_backward_args, inner, 72);
FROZEN_FIELD(xd_moe_backward_args, activated, 80);
FROZEN_FIELD(xd_moe_backward_args, expert_out, 88);
FROZEN_FIELD(xd_moe_backward_args, grad_expert_out, 96);
FROZEN_FIELD(xd_moe_backward_args, grad_recv_weights, 104);
FROZEN_FIELD(xd_moe_backward_args, grad_activated, 112);
FROZEN_FIELD(xd_moe_backward_args, grad_inner, 120);
FROZEN_FIELD(xd_moe_backward_args, grad_recv_tokens, 128);
FROZEN_FIELD(xd_moe_backward_args, grad_tokens, 136);
FROZEN_FIELD(xd_moe_backward_args, grad_topk_weights, 144);
FROZEN_FIELD(xd_moe_backward_args, grad_w_in, 152);
FROZEN_FIELD(xd_moe_backward_args, grad_w_out, 160);
FROZEN_FIELD(xd_moe_backward_args, activation, 168);
FROZEN_FIELD(xd_moe_backward_args, parts, 172);
FROZEN_FIELD(xd_moe_backward_args, num_sms, 176);
FROZEN_FIELD(xd_moe_backward_args, accumulate, 180);

FROZEN_SIZE(xd_moe_memory, 40);
FROZEN_FIELD(xd_moe_memory, struct_size, 0);
FROZEN_FIELD(xd_moe_memory, rows, 8);
FROZEN_FIELD(xd_moe_memory, kept_bytes, 16);
FROZEN_FIELD(xd_moe_memory, backward_bytes, 24);
FROZEN_FIELD(xd_moe_memory, row_tensor_bytes, 32);

FROZEN_SIZE(xd_moe_overlap, 24);
FROZEN_FIELD(xd_moe_overlap, struct_size, 0);
FROZEN_FIELD(xd_moe_overlap, parts, 8);
FROZEN_FIELD(xd_moe_overlap, num_sms, 12);
FROZEN_FIELD(xd_moe_overlap, predicted_ratio, 16);

#endif /* CROSSDOCK_TESTS_ABI_FROZEN_MOE_H_ */
