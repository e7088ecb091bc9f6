/* The binary interface as it was released: sizes, offsets and values that compiled callers rely on.
 * A new field goes to the end of its struct and gets a line here, a new code gets the next number;
 * no line that stands here ever changes. LP64; included by a C and by a C++ translation unit. */
#ifndef CROSSDOCK_TESTS_ABI_FROZEN_H_
#define CROSSDOCK_TESTS_ABI_FROZEN_H_

#include <assert.h>
#include <crossdock/crossdock.h>
#include <stddef.h>

#define FROZEN_SIZE(type, bytes) static_assert(sizeof(type) == (bytes), "size of " #type)
#define FROZEN_FIELD(type, field, bytes) \
  static_assert(offsetof(type, field) == (bytes), "place of " #type "." #field)
#define FROZEN_ENUM(type)         static_assert(sizeof(type) == 4, "size of " #type)
#define FROZEN_VALUE(name, value) static_assert((int)(name) == (value), "value of " #name)

static_assert(sizeof(void*) == 8 && sizeof(size_t) == 8, "the numbers below are those of LP64");
static_assert(XD_UNIQUE_ID_BYTES == 128, "value of XD_UNIQUE_ID_BYTES");

FROZEN_ENUM(xd_status);
FROZEN_VALUE(XD_SUCCESS, 0);
FROZEN_VALUE(XD_ERROR_INVALID_ARGUMENT, 1);
FROZEN_VALUE(XD_ERROR_MISMATCH, 2);
FROZEN_VALUE(XD_ERROR_OVERFLOW, 3);
FROZEN_VALUE(XD_ERROR_TIMEOUT, 4);
FROZEN_VALUE(XD_ERROR_PEER_LOST, 5);
FROZEN_VALUE(XD_ERROR_ABORTED, 6);
FROZEN_VALUE(XD_ERROR_BUSY, 7);
FROZEN_VALUE(XD_ERROR_OUT_OF_MEMORY, 8);
FROZEN_VALUE(XD_ERROR_UNSUPPORTED, 9);
FROZEN_VALUE(XD_ERROR_SYSTEM, 10);
FROZEN_VALUE(XD_ERROR_INTERNAL, 11);

FROZEN_ENUM(xd_feature);
FROZEN_VALUE(XD_FEATURE_CPU, 0);
FROZEN_VALUE(XD_FEATURE_CUDA, 1);
FROZEN_VALUE(XD_FEATURE_NETWORK, 2);
FROZEN_VALUE(XD_FEATURE_GEMM, 3);

FROZEN_SIZE(xd_unique_id, 128);
FROZEN_FIELD(xd_unique_id, bytes, 0);

FROZEN_SIZE(xd_unique_id_config, 24);
FROZEN_FIELD(xd_unique_id_config, struct_size, 0);
FROZEN_FIELD(xd_unique_id_config, address, 8);
FROZEN_FIELD(xd_unique_id_config, port, 16);
FROZEN_FIELD(xd_unique_id_config, timeout_ms, 20);

FROZEN_SIZE(xd_comm_config, 96);
FROZEN_FIELD(xd_comm_config, struct_size, 0);
FROZEN_FIELD(xd_comm_config, bootstrap, 8);
FROZEN_FIELD(xd_comm_config, rank, 12);
FROZEN_FIELD(xd_comm_config, num_ranks, 16);
FROZEN_FIELD(xd_comm_config, unique_id, 24);
FROZEN_FIELD(xd_comm_config, all_gather, 32);
FROZEN_FIELD(xd_comm_config, all_gather_context, 40);
FROZEN_FIELD(xd_comm_config, device, 48);
FROZEN_FIELD(xd_comm_config, heap_bytes, 56);
FROZEN_FIELD(xd_comm_config, timeout_ms, 64);
FROZEN_FIELD(xd_comm_config, name, 72);
FROZEN_FIELD(xd_comm_config, nccl_comm, 80);
FROZEN_FIELD(xd_comm_config, on_peer_loss, 88);

FROZEN_SIZE(xd_comm_info, 32);
FROZEN_FIELD(xd_comm_info, struct_size, 0);
FROZEN_FIELD(xd_comm_info, rank, 8);
FROZEN_FIELD(xd_comm_info, num_ranks, 12);
FROZEN_FIELD(xd_comm_info, device, 16);
FROZEN_FIELD(xd_comm_info, timeout_ms, 24);
FROZEN_FIELD(xd_comm_info, local_ranks, 28);

FROZEN_SIZE(xd_error_info, 304);
FROZEN_FIELD(xd_error_info, struct_size, 0);
FROZEN_FIELD(xd_error_info, status, 8);
FROZEN_FIELD(xd_error_info, phase, 12);
FROZEN_FIELD(xd_error_info, rank, 16);
FROZEN_FIELD(xd_error_info, peer, 20);
FROZEN_FIELD(xd_error_info, group, 24);
FROZEN_FIELD(xd_error_info, operation, 28);
FROZEN_FIELD(xd_error_info, expected_epoch, 32);
FROZEN_FIELD(xd_error_info, seen_epoch, 40);
FROZEN_FIELD(xd_error_info, text, 48);

FROZEN_SIZE(xd_mem_info, 40);
FROZEN_FIELD(xd_mem_info, struct_size, 0);
FROZEN_FIELD(xd_mem_info, total_bytes, 8);
FROZEN_FIELD(xd_mem_info, used_bytes, 16);
FROZEN_FIELD(xd_mem_info, largest_free_bytes, 24);
FROZEN_FIELD(xd_mem_info, segments, 32);
FROZEN_FIELD(xd_mem_info, huge_pages, 36);

FROZEN_SIZE(xd_mem_handle, 16);
FROZEN_FIELD(xd_mem_handle, rank, 0);
FROZEN_FIELD(xd_mem_handle, segment, 4);
FROZEN_FIELD(xd_mem_handle, offset, 8);

FROZEN_ENUM(xd_bootstrap);
FROZEN_VALUE(XD_BOOTSTRAP_UNIQUE_ID, 0);
FROZEN_VALUE(XD_BOOTSTRAP_ENVIRONMENT, 1);
FROZEN_VALUE(XD_BOOTSTRAP_ALL_GATHER, 2);

FROZEN_ENUM(xd_comm_peer_loss);
FROZEN_VALUE(XD_COMM_PEER_LOSS_FATAL, 0);
FROZEN_VALUE(XD_COMM_PEER_LOSS_MASK, 1);

FROZEN_ENUM(xd_phase);
FROZEN_VALUE(XD_PHASE_NONE, 0);
FROZEN_VALUE(XD_PHASE_HOST, 1);
FROZEN_VALUE(XD_PHASE_ENTRY, 2);
FROZEN_VALUE(XD_PHASE_COUNTS, 3);
FROZEN_VALUE(XD_PHASE_DONE, 4);
FROZEN_VALUE(XD_PHASE_ROWS, 5);
FROZEN_VALUE(XD_PHASE_CREDIT, 6);

FROZEN_SIZE(xd_ep_config, 112);
FROZEN_FIELD(xd_ep_config, struct_size, 0);
FROZEN_FIELD(xd_ep_config, num_ranks, 8);
FROZEN_FIELD(xd_ep_config, num_experts, 12);
FROZEN_FIELD(xd_ep_config, max_topk, 16);
FROZEN_FIELD(xd_ep_config, max_tokens_per_rank, 20);
FROZEN_FIELD(xd_ep_config, hidden, 24);
FROZEN_FIELD(xd_ep_config, dtype, 28);
FROZEN_FIELD(xd_ep_config, max_scale_bytes, 32);
FROZEN_FIELD(xd_ep_config, layout, 36);
FROZEN_FIELD(xd_ep_config, alignment, 40);
FROZEN_FIELD(xd_ep_config, recv_capacity, 48);
FROZEN_FIELD(xd_ep_config, overflow, 56);
FROZEN_FIELD(xd_ep_config, duplicate_ids, 60);
FROZEN_FIELD(xd_ep_config, on_error, 64);
FROZEN_FIELD(xd_ep_config, staging, 68);
FROZEN_FIELD(xd_ep_config, zero_tail, 72);
FROZEN_FIELD(xd_ep_config, num_sms, 76);
FROZEN_FIELD(xd_ep_config, device_type, 80);
FROZEN_FIELD(xd_ep_config, expert_ranks, 88);
FROZEN_FIELD(xd_ep_config, in_flight, 96);
FROZEN_FIELD(xd_ep_config, on_peer_loss, 100);
FROZEN_FIELD(xd_ep_config, wait_timeout_ms, 104);

FROZEN_SIZE(xd_ep_memory, 32);
FROZEN_FIELD(xd_ep_memory, struct_size, 0);
FROZEN_FIELD(xd_ep_memory, symmetric_bytes, 8);
FROZEN_FIELD(xd_ep_memory, staging_bytes, 16);
FROZEN_FIELD(xd_ep_memory, private_bytes, 24);

FROZEN_SIZE(xd_ep_status, 352);
FROZEN_FIELD(xd_ep_status, struct_size, 0);
FROZEN_FIELD(xd_ep_status, status, 8);
FROZEN_FIELD(xd_ep_status, operation, 12);
FROZEN_FIELD(xd_ep_status, epoch, 16);
FROZEN_FIELD(xd_ep_status, rank, 24);
FROZEN_FIELD(xd_ep_status, bad_ids, 32);
FROZEN_FIELD(xd_ep_status, needed_rows, 40);
FROZEN_FIELD(xd_ep_status, capacity_rows, 48);
FROZEN_FIELD(xd_ep_status, dropped_rows, 56);
FROZEN_FIELD(xd_ep_status, text, 64);
FROZEN_FIELD(xd_ep_status, masked, 320);
FROZEN_FIELD(xd_ep_status, masked_by, 336);

FROZEN_SIZE(xd_ep_prepare_args, 80);
FROZEN_FIELD(xd_ep_prepare_args, struct_size, 0);
FROZEN_FIELD(xd_ep_prepare_args, topk_idx, 8);
FROZEN_FIELD(xd_ep_prepare_args, plan, 16);
FROZEN_FIELD(xd_ep_prepare_args, plan_bytes, 24);
FROZEN_FIELD(xd_ep_prepare_args, alignment, 32);
FROZEN_FIELD(xd_ep_prepare_args, counts, 40);
FROZEN_FIELD(xd_ep_prepare_args, padded_counts, 48);
FROZEN_FIELD(xd_ep_prepare_args, offsets, 56);
FROZEN_FIELD(xd_ep_prepare_args, total, 64);
FROZEN_FIELD(xd_ep_prepare_args, rank_rows, 72);

FROZEN_SIZE(xd_ep_dispatch_args, 88);
FROZEN_FIELD(xd_ep_dispatch_args, struct_size, 0);
FROZEN_FIELD(xd_ep_dispatch_args, plan, 8);
FROZEN_FIELD(xd_ep_dispatch_args, plan_bytes, 16);
FROZEN_FIELD(xd_ep_dispatch_args, tokens, 24);
FROZEN_FIELD(xd_ep_dispatch_args, scales, 32);
FROZEN_FIELD(xd_ep_dispatch_args, topk_weights, 40);
FROZEN_FIELD(xd_ep_dispatch_args, recv_tokens, 48);
FROZEN_FIELD(xd_ep_dispatch_args, recv_scales, 56);
FROZEN_FIELD(xd_ep_dispatch_args, recv_weights, 64);
FROZEN_FIELD(xd_ep_dispatch_args, recv_topk_idx, 72);
FROZEN_FIELD(xd_ep_dispatch_args, quantise, 80);

FROZEN_SIZE(xd_ep_combine_args, 48);
FROZEN_FIELD(xd_ep_combine_args, struct_size, 0);
FROZEN_FIELD(xd_ep_combine_args, plan, 8);
FROZEN_FIELD(xd_ep_combine_args, plan_bytes, 16);
FROZEN_FIELD(xd_ep_combine_args, expert_out, 24);
FROZEN_FIELD(xd_ep_combine_args, weights, 32);
FROZEN_FIELD(xd_ep_combine_args, out, 40);

FROZEN_SIZE(xd_ep_dispatch_bwd_args, 56);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, struct_size, 0);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, plan, 8);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, plan_bytes, 16);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, grad_recv_tokens, 24);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, grad_recv_weights, 32);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, grad_tokens, 40);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, grad_topk_weights, 48);

FROZEN_SIZE(xd_ep_combine_bwd_args, 80);
FROZEN_FIELD(xd_ep_combine_bwd_args, struct_size, 0);
FROZEN_FIELD(xd_ep_combine_bwd_args, plan, 8);
FROZEN_FIELD(xd_ep_combine_bwd_args, plan_bytes, 16);
FROZEN_FIELD(xd_ep_combine_bwd_args, grad_out, 24);
FROZEN_FIELD(xd_ep_combine_bwd_args, expert_out, 32);
FROZEN_FIELD(xd_ep_combine_bwd_args, weights, 40);
FROZEN_FIELD(xd_ep_combine_bwd_args, grad_expert_out, 48);
FROZEN_FIELD(xd_ep_combine_bwd_args, grad_weights, 56);
FROZEN_FIELD(xd_ep_combine_bwd_args, grad_out_scales, 64);
FROZEN_FIELD(xd_ep_combine_bwd_args, grad_expert_out_scales, 72);

FROZEN_SIZE(xd_ep_plan_info, 96);
FROZEN_FIELD(xd_ep_plan_info, struct_size, 0);
FROZEN_FIELD(xd_ep_plan_info, rank, 8);
FROZEN_FIELD(xd_ep_plan_info, num_ranks, 12);
FROZEN_FIELD(xd_ep_plan_info, num_experts, 16);
FROZEN_FIELD(xd_ep_plan_info, num_tokens, 20);
FROZEN_FIELD(xd_ep_plan_info, topk, 24);
FROZEN_FIELD(xd_ep_plan_info, layout, 28);
FROZEN_FIELD(xd_ep_plan_info, alignment, 32);
FROZEN_FIELD(xd_ep_plan_info, recv_rows, 40);
FROZEN_FIELD(xd_ep_plan_info, total_rows, 48);
FROZEN_FIELD(xd_ep_plan_info, capacity_rows, 56);
FROZEN_FIELD(xd_ep_plan_info, bad_ids, 64);
FROZEN_FIELD(xd_ep_plan_info, bad_id_rank, 72);
FROZEN_FIELD(xd_ep_plan_info, overflow_rank, 76);
FROZEN_FIELD(xd_ep_plan_info, fingerprint, 80);
FROZEN_FIELD(xd_ep_plan_info, epoch, 88);

FROZEN_SIZE(xd_ep_plan_row_experts_args, 32);
FROZEN_FIELD(xd_ep_plan_row_experts_args, struct_size, 0);
FROZEN_FIELD(xd_ep_plan_row_experts_args, plan, 8);
FROZEN_FIELD(xd_ep_plan_row_experts_args, plan_bytes, 16);
FROZEN_FIELD(xd_ep_plan_row_experts_args, row_experts, 24);

FROZEN_SIZE(xd_ep_routing_layout_args, 64);
FROZEN_FIELD(xd_ep_routing_layout_args, struct_size, 0);
FROZEN_FIELD(xd_ep_routing_layout_args, num_experts, 8);
FROZEN_FIELD(xd_ep_routing_layout_args, topk_idx, 16);
FROZEN_FIELD(xd_ep_routing_layout_args, rows_per_rank, 24);
FROZEN_FIELD(xd_ep_routing_layout_args, rows_per_expert, 32);
FROZEN_FIELD(xd_ep_routing_layout_args, token_in_rank, 40);
FROZEN_FIELD(xd_ep_routing_layout_args, bad_ids, 48);
FROZEN_FIELD(xd_ep_routing_layout_args, expert_ranks, 56);

FROZEN_ENUM(xd_ep_layout);
FROZEN_VALUE(XD_EP_EXPERT_MAJOR, 0);
FROZEN_VALUE(XD_EP_RANK_MAJOR, 1);
FROZEN_VALUE(XD_EP_EXPERT_SLOTS, 2);

FROZEN_ENUM(xd_ep_overflow);
FROZEN_VALUE(XD_EP_OVERFLOW_ERROR, 0);
FROZEN_VALUE(XD_EP_OVERFLOW_DROP, 1);

FROZEN_ENUM(xd_ep_duplicate_ids);
FROZEN_VALUE(XD_EP_DUPLICATE_IDS_ERROR, 0);
FROZEN_VALUE(XD_EP_DUPLICATE_IDS_COLLAPSE, 1);

FROZEN_ENUM(xd_ep_on_error);
FROZEN_VALUE(XD_EP_ON_ERROR_STATUS, 0);
FROZEN_VALUE(XD_EP_ON_ERROR_FATAL, 1);

FROZEN_ENUM(xd_ep_quantise);
FROZEN_VALUE(XD_EP_QUANTISE_NONE, 0);
FROZEN_VALUE(XD_EP_QUANTISE_FP8_BLOCK128, 1);
FROZEN_VALUE(XD_EP_QUANTISE_FP8_BLOCK128_POW2, 2);
FROZEN_VALUE(XD_EP_QUANTISE_FP8_BLOCK128_E8M0, 3);
FROZEN_VALUE(XD_EP_QUANTISE_MXFP8, 4);

FROZEN_ENUM(xd_ep_staging);
FROZEN_VALUE(XD_EP_STAGING_AUTO, 0);
FROZEN_VALUE(XD_EP_STAGING_NONE, 1);

FROZEN_ENUM(xd_ep_peer_loss);
FROZEN_VALUE(XD_EP_PEER_LOSS_FATAL, 0);
FROZEN_VALUE(XD_EP_PEER_LOSS_MASK, 1);

FROZEN_ENUM(xd_ep_operation);
FROZEN_VALUE(XD_EP_PREPARE, 0);
FROZEN_VALUE(XD_EP_DISPATCH, 1);
FROZEN_VALUE(XD_EP_COMBINE, 2);
FROZEN_VALUE(XD_EP_DISPATCH_BWD, 3);
FROZEN_VALUE(XD_EP_COMBINE_BWD, 4);
FROZEN_VALUE(XD_EP_LL_DISPATCH, 5);
FROZEN_VALUE(XD_EP_LL_COMBINE, 6);
FROZEN_VALUE(XD_EP_LL_RESET, 7);

FROZEN_ENUM(xd_ep_phase);
FROZEN_VALUE(XD_EP_PHASE_BOTH, 0);
FROZEN_VALUE(XD_EP_PHASE_SEND, 1);
FROZEN_VALUE(XD_EP_PHASE_RECEIVE, 2);

FROZEN_SIZE(xd_ep_ll_dispatch_args, 120);
FROZEN_FIELD(xd_ep_ll_dispatch_args, struct_size, 0);
FROZEN_FIELD(xd_ep_ll_dispatch_args, phase, 8);
FROZEN_FIELD(xd_ep_ll_dispatch_args, tokens, 16);
FROZEN_FIELD(xd_ep_ll_dispatch_args, topk_idx, 24);
FROZEN_FIELD(xd_ep_ll_dispatch_args, topk_weights, 32);
FROZEN_FIELD(xd_ep_ll_dispatch_args, quantise, 40);
FROZEN_FIELD(xd_ep_ll_dispatch_args, plan, 48);
FROZEN_FIELD(xd_ep_ll_dispatch_args, plan_bytes, 56);
FROZEN_FIELD(xd_ep_ll_dispatch_args, recv_tokens, 64);
FROZEN_FIELD(xd_ep_ll_dispatch_args, recv_scales, 72);
FROZEN_FIELD(xd_ep_ll_dispatch_args, counts, 80);
FROZEN_FIELD(xd_ep_ll_dispatch_args, source_ranges, 88);
FROZEN_FIELD(xd_ep_ll_dispatch_args, source_tokens, 96);
FROZEN_FIELD(xd_ep_ll_dispatch_args, expert_load, 104);
FROZEN_FIELD(xd_ep_ll_dispatch_args, wait_ns, 112);

FROZEN_SIZE(xd_ep_ll_combine_args, 64);
FROZEN_FIELD(xd_ep_ll_combine_args, struct_size, 0);
FROZEN_FIELD(xd_ep_ll_combine_args, phase, 8);
FROZEN_FIELD(xd_ep_ll_combine_args, plan, 16);
FROZEN_FIELD(xd_ep_ll_combine_args, plan_bytes, 24);
FROZEN_FIELD(xd_ep_ll_combine_args, expert_out, 32);
FROZEN_FIELD(xd_ep_ll_combine_args, topk_weights, 40);
FROZEN_FIELD(xd_ep_ll_combine_args, out, 48);
FROZEN_FIELD(xd_ep_ll_combine_args, wait_ns, 56);

#endif /* CROSSDOCK_TESTS_ABI_FROZEN_H_ */
