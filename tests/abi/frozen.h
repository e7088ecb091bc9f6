/* The binary interface as it was released, which compiled callers rely on. A new field begins at
 * the size of its struct so far (abi_test.cc) and gets a line here, a new code the next number; but
 * for sizes no line ever changes. LP64; included by a C and by a C++ translation unit. */
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
FROZEN_VALUE(XD_FEATURE_CUBLASMP, 4);
FROZEN_VALUE(XD_FEATURE_CUDA_WIRE, 5);
FROZEN_VALUE(XD_FEATURE_CUDA_PLACEMENT, 6);
FROZEN_VALUE(XD_FEATURE_CUDA_LL_MACHINES, 7);

FROZEN_SIZE(xd_unique_id, 128);
FROZEN_FIELD(xd_unique_id, bytes, 0);

FROZEN_SIZE(xd_unique_id_config, 24);
FROZEN_FIELD(xd_unique_id_config, struct_size, 0);
FROZEN_FIELD(xd_unique_id_config, address, 8);
FROZEN_FIELD(xd_unique_id_config, port, 16);
FROZEN_FIELD(xd_unique_id_config, timeout_ms, 20);

FROZEN_SIZE(xd_comm_config, 136);
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
FROZEN_FIELD(xd_comm_config, host, 96);
FROZEN_FIELD(xd_comm_config, net_interface, 104);
FROZEN_FIELD(xd_comm_config, silence_ms, 112);
FROZEN_FIELD(xd_comm_config, global_ranks, 120);

FROZEN_SIZE(xd_comm_info, 48);
FROZEN_FIELD(xd_comm_info, struct_size, 0);
FROZEN_FIELD(xd_comm_info, rank, 8);
FROZEN_FIELD(xd_comm_info, num_ranks, 12);
FROZEN_FIELD(xd_comm_info, device, 16);
FROZEN_FIELD(xd_comm_info, timeout_ms, 24);
FROZEN_FIELD(xd_comm_info, local_ranks, 28);
FROZEN_FIELD(xd_comm_info, num_hosts, 32);
FROZEN_FIELD(xd_comm_info, host, 36);
FROZEN_FIELD(xd_comm_info, near_ranks, 40);

FROZEN_SIZE(xd_error_info, 312);
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
FROZEN_FIELD(xd_error_info, host, 304);

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
FROZEN_SIZE(xd_net_adapter, 424);
FROZEN_FIELD(xd_net_adapter, name, 0);
FROZEN_FIELD(xd_net_adapter, provider, 64);
FROZEN_FIELD(xd_net_adapter, address, 96);
FROZEN_FIELD(xd_net_adapter, pci_path, 144);
FROZEN_FIELD(xd_net_adapter, bits_per_second, 400);
FROZEN_FIELD(xd_net_adapter, cuda_devices, 408);
FROZEN_FIELD(xd_net_adapter, numa_node, 416);
FROZEN_FIELD(xd_net_adapter, is_up, 420);

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

FROZEN_SIZE(xd_ep_config, 128);
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
FROZEN_FIELD(xd_ep_config, net_buffer_bytes, 96);
FROZEN_FIELD(xd_ep_config, wire_formats, 104);
FROZEN_FIELD(xd_ep_config, num_logical_experts, 112);

FROZEN_SIZE(xd_ep_memory, 32);
FROZEN_FIELD(xd_ep_memory, struct_size, 0);
FROZEN_FIELD(xd_ep_memory, symmetric_bytes, 8);
FROZEN_FIELD(xd_ep_memory, staging_bytes, 16);
FROZEN_FIELD(xd_ep_memory, private_bytes, 24);

FROZEN_SIZE(xd_ep_status, 328);
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
FROZEN_FIELD(xd_ep_status, unplaced_choices, 320);

FROZEN_SIZE(xd_ep_prepare_args, 96);
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
FROZEN_FIELD(xd_ep_prepare_args, parts, 80);
FROZEN_FIELD(xd_ep_prepare_args, replica_hint, 88);

FROZEN_SIZE(xd_ep_dispatch_args, 96);
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
FROZEN_FIELD(xd_ep_dispatch_args, part, 84);
FROZEN_FIELD(xd_ep_dispatch_args, num_sms, 88);

FROZEN_SIZE(xd_ep_combine_args, 64);
FROZEN_FIELD(xd_ep_combine_args, struct_size, 0);
FROZEN_FIELD(xd_ep_combine_args, plan, 8);
FROZEN_FIELD(xd_ep_combine_args, plan_bytes, 16);
FROZEN_FIELD(xd_ep_combine_args, expert_out, 24);
FROZEN_FIELD(xd_ep_combine_args, weights, 32);
FROZEN_FIELD(xd_ep_combine_args, out, 40);
FROZEN_FIELD(xd_ep_combine_args, part, 48);
FROZEN_FIELD(xd_ep_combine_args, num_sms, 52);
FROZEN_FIELD(xd_ep_combine_args, wire, 56);

FROZEN_SIZE(xd_ep_dispatch_bwd_args, 64);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, struct_size, 0);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, plan, 8);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, plan_bytes, 16);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, grad_recv_tokens, 24);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, grad_recv_weights, 32);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, grad_tokens, 40);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, grad_topk_weights, 48);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, part, 56);
FROZEN_FIELD(xd_ep_dispatch_bwd_args, num_sms, 60);

FROZEN_SIZE(xd_ep_combine_bwd_args, 88);
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
FROZEN_FIELD(xd_ep_combine_bwd_args, part, 80);
FROZEN_FIELD(xd_ep_combine_bwd_args, num_sms, 84);

FROZEN_SIZE(xd_ep_plan_info, 104);
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
FROZEN_FIELD(xd_ep_plan_info, parts, 96);

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

FROZEN_ENUM(xd_gated_activation);
FROZEN_VALUE(XD_GATED_SILU, 0);
FROZEN_VALUE(XD_GATED_GELU_TANH, 1);
FROZEN_VALUE(XD_GATED_RELU, 2);
FROZEN_VALUE(XD_GATED_RELU_SQUARED, 3);

FROZEN_SIZE(xd_gated_args, 80);
FROZEN_FIELD(xd_gated_args, struct_size, 0);
FROZEN_FIELD(xd_gated_args, activation, 8);
FROZEN_FIELD(xd_gated_args, gate, 16);
FROZEN_FIELD(xd_gated_args, up, 24);
FROZEN_FIELD(xd_gated_args, weights, 32);
FROZEN_FIELD(xd_gated_args, offsets, 40);
FROZEN_FIELD(xd_gated_args, out, 48);
FROZEN_FIELD(xd_gated_args, first_expert, 56);
FROZEN_FIELD(xd_gated_args, num_experts, 60);
FROZEN_FIELD(xd_gated_args, out_scales, 64);
FROZEN_FIELD(xd_gated_args, quantise, 72);

FROZEN_SIZE(xd_gated_bwd_args, 88);
FROZEN_FIELD(xd_gated_bwd_args, struct_size, 0);
FROZEN_FIELD(xd_gated_bwd_args, activation, 8);
FROZEN_FIELD(xd_gated_bwd_args, grad_out, 16);
FROZEN_FIELD(xd_gated_bwd_args, gate, 24);
FROZEN_FIELD(xd_gated_bwd_args, up, 32);
FROZEN_FIELD(xd_gated_bwd_args, weights, 40);
FROZEN_FIELD(xd_gated_bwd_args, offsets, 48);
FROZEN_FIELD(xd_gated_bwd_args, grad_gate, 56);
FROZEN_FIELD(xd_gated_bwd_args, grad_up, 64);
FROZEN_FIELD(xd_gated_bwd_args, grad_weights, 72);
FROZEN_FIELD(xd_gated_bwd_args, first_expert, 80);
FROZEN_FIELD(xd_gated_bwd_args, num_experts, 84);

FROZEN_SIZE(xd_grouped_product_args, 72);
FROZEN_FIELD(xd_grouped_product_args, struct_size, 0);
FROZEN_FIELD(xd_grouped_product_args, a, 8);
FROZEN_FIELD(xd_grouped_product_args, b, 16);
FROZEN_FIELD(xd_grouped_product_args, offsets, 24);
FROZEN_FIELD(xd_grouped_product_args, a_scale, 32);
FROZEN_FIELD(xd_grouped_product_args, b_scale, 40);
FROZEN_FIELD(xd_grouped_product_args, d, 48);
FROZEN_FIELD(xd_grouped_product_args, first_expert, 56);
FROZEN_FIELD(xd_grouped_product_args, num_experts, 60);
FROZEN_FIELD(xd_grouped_product_args, accumulate, 64);

FROZEN_SIZE(xd_grouped_outer_args, 56);
FROZEN_FIELD(xd_grouped_outer_args, struct_size, 0);
FROZEN_FIELD(xd_grouped_outer_args, a, 8);
FROZEN_FIELD(xd_grouped_outer_args, b, 16);
FROZEN_FIELD(xd_grouped_outer_args, offsets, 24);
FROZEN_FIELD(xd_grouped_outer_args, d, 32);
FROZEN_FIELD(xd_grouped_outer_args, first_expert, 40);
FROZEN_FIELD(xd_grouped_outer_args, num_experts, 44);
FROZEN_FIELD(xd_grouped_outer_args, accumulate, 48);

FROZEN_ENUM(xd_ep_layout);
FROZEN_VALUE(XD_EP_EXPERT_MAJOR, 0);
FROZEN_VALUE(XD_EP_RANK_MAJOR, 1);

FROZEN_ENUM(xd_ep_overflow);
FROZEN_VALUE(XD_EP_OVERFLOW_ERROR, 0);
FROZEN_VALUE(XD_EP_OVERFLOW_DROP, 1);

FROZEN_ENUM(xd_ep_duplicate_ids);
FROZEN_VALUE(XD_EP_DUPLICATE_IDS_ERROR, 0);
FROZEN_VALUE(XD_EP_DUPLICATE_IDS_COLLAPSE, 1);

FROZEN_ENUM(xd_ep_on_error);
FROZEN_VALUE(XD_EP_ON_ERROR_STATUS, 0);
FROZEN_VALUE(XD_EP_ON_ERROR_FATAL, 1);

FROZEN_ENUM(xd_ep_staging);
FROZEN_VALUE(XD_EP_STAGING_AUTO, 0);
FROZEN_VALUE(XD_EP_STAGING_NONE, 1);

FROZEN_ENUM(xd_ep_operation);
FROZEN_VALUE(XD_EP_PREPARE, 0);
FROZEN_VALUE(XD_EP_DISPATCH, 1);
FROZEN_VALUE(XD_EP_COMBINE, 2);
FROZEN_VALUE(XD_EP_DISPATCH_BWD, 3);
FROZEN_VALUE(XD_EP_COMBINE_BWD, 4);
FROZEN_VALUE(XD_EP_SET_PLACEMENT, 8);

FROZEN_SIZE(xd_ll_config, 96);
FROZEN_FIELD(xd_ll_config, struct_size, 0);
FROZEN_FIELD(xd_ll_config, num_ranks, 8);
FROZEN_FIELD(xd_ll_config, num_experts, 12);
FROZEN_FIELD(xd_ll_config, max_topk, 16);
FROZEN_FIELD(xd_ll_config, max_tokens_per_rank, 20);
FROZEN_FIELD(xd_ll_config, hidden, 24);
FROZEN_FIELD(xd_ll_config, dtype, 28);
FROZEN_FIELD(xd_ll_config, duplicate_ids, 32);
FROZEN_FIELD(xd_ll_config, on_error, 36);
FROZEN_FIELD(xd_ll_config, on_peer_loss, 40);
FROZEN_FIELD(xd_ll_config, in_flight, 44);
FROZEN_FIELD(xd_ll_config, wait_timeout_ms, 48);
FROZEN_FIELD(xd_ll_config, num_sms, 52);
FROZEN_FIELD(xd_ll_config, device_type, 56);
FROZEN_FIELD(xd_ll_config, expert_ranks, 64);
FROZEN_FIELD(xd_ll_config, receive, 72);
FROZEN_FIELD(xd_ll_config, alignment, 76);
FROZEN_FIELD(xd_ll_config, wire_formats, 80);
FROZEN_FIELD(xd_ll_config, num_logical_experts, 88);

FROZEN_SIZE(xd_ll_memory, 24);
FROZEN_FIELD(xd_ll_memory, struct_size, 0);
FROZEN_FIELD(xd_ll_memory, symmetric_bytes, 8);
FROZEN_FIELD(xd_ll_memory, private_bytes, 16);

FROZEN_SIZE(xd_ll_status, 336);
FROZEN_FIELD(xd_ll_status, struct_size, 0);
FROZEN_FIELD(xd_ll_status, status, 8);
FROZEN_FIELD(xd_ll_status, operation, 12);
FROZEN_FIELD(xd_ll_status, epoch, 16);
FROZEN_FIELD(xd_ll_status, rank, 24);
FROZEN_FIELD(xd_ll_status, bad_ids, 32);
FROZEN_FIELD(xd_ll_status, text, 40);
FROZEN_FIELD(xd_ll_status, masked, 296);
FROZEN_FIELD(xd_ll_status, masked_by, 312);
FROZEN_FIELD(xd_ll_status, unplaced_choices, 328);

FROZEN_SIZE(xd_ll_plan_info, 72);
FROZEN_FIELD(xd_ll_plan_info, struct_size, 0);
FROZEN_FIELD(xd_ll_plan_info, rank, 8);
FROZEN_FIELD(xd_ll_plan_info, num_ranks, 12);
FROZEN_FIELD(xd_ll_plan_info, num_experts, 16);
FROZEN_FIELD(xd_ll_plan_info, num_tokens, 20);
FROZEN_FIELD(xd_ll_plan_info, topk, 24);
FROZEN_FIELD(xd_ll_plan_info, recv_rows, 32);
FROZEN_FIELD(xd_ll_plan_info, bad_ids, 40);
FROZEN_FIELD(xd_ll_plan_info, bad_id_rank, 48);
FROZEN_FIELD(xd_ll_plan_info, fingerprint, 56);
FROZEN_FIELD(xd_ll_plan_info, epoch, 64);

FROZEN_ENUM(xd_ll_peer_loss);
FROZEN_VALUE(XD_LL_PEER_LOSS_FATAL, 0);
FROZEN_VALUE(XD_LL_PEER_LOSS_MASK, 1);

FROZEN_ENUM(xd_ll_receive);
FROZEN_VALUE(XD_LL_SLOTS, 0);
FROZEN_VALUE(XD_LL_BY_EXPERT, 1);
FROZEN_VALUE(XD_LL_BY_RANK, 2);

FROZEN_ENUM(xd_ll_operation);
FROZEN_VALUE(XD_LL_DISPATCH, 5);
FROZEN_VALUE(XD_LL_COMBINE, 6);
FROZEN_VALUE(XD_LL_RESET, 7);
FROZEN_VALUE(XD_LL_SET_PLACEMENT, 9);

FROZEN_ENUM(xd_ll_phase);
FROZEN_VALUE(XD_LL_PHASE_BOTH, 0);
FROZEN_VALUE(XD_LL_PHASE_SEND, 1);
FROZEN_VALUE(XD_LL_PHASE_RECEIVE, 2);

FROZEN_SIZE(xd_ll_dispatch_args, 160);
FROZEN_FIELD(xd_ll_dispatch_args, struct_size, 0);
FROZEN_FIELD(xd_ll_dispatch_args, phase, 8);
FROZEN_FIELD(xd_ll_dispatch_args, tokens, 16);
FROZEN_FIELD(xd_ll_dispatch_args, topk_idx, 24);
FROZEN_FIELD(xd_ll_dispatch_args, topk_weights, 32);
FROZEN_FIELD(xd_ll_dispatch_args, quantise, 40);
FROZEN_FIELD(xd_ll_dispatch_args, max_tokens, 44);
FROZEN_FIELD(xd_ll_dispatch_args, plan, 48);
FROZEN_FIELD(xd_ll_dispatch_args, plan_bytes, 56);
FROZEN_FIELD(xd_ll_dispatch_args, recv_tokens, 64);
FROZEN_FIELD(xd_ll_dispatch_args, recv_scales, 72);
FROZEN_FIELD(xd_ll_dispatch_args, counts, 80);
FROZEN_FIELD(xd_ll_dispatch_args, source_ranges, 88);
FROZEN_FIELD(xd_ll_dispatch_args, source_tokens, 96);
FROZEN_FIELD(xd_ll_dispatch_args, expert_load, 104);
FROZEN_FIELD(xd_ll_dispatch_args, wait_ns, 112);
FROZEN_FIELD(xd_ll_dispatch_args, row_offsets, 120);
FROZEN_FIELD(xd_ll_dispatch_args, recv_weights, 128);
FROZEN_FIELD(xd_ll_dispatch_args, recv_topk_idx, 136);
FROZEN_FIELD(xd_ll_dispatch_args, scales, 144);
FROZEN_FIELD(xd_ll_dispatch_args, replica_hint, 152);

FROZEN_SIZE(xd_ll_combine_args, 72);
FROZEN_FIELD(xd_ll_combine_args, struct_size, 0);
FROZEN_FIELD(xd_ll_combine_args, phase, 8);
FROZEN_FIELD(xd_ll_combine_args, plan, 16);
FROZEN_FIELD(xd_ll_combine_args, plan_bytes, 24);
FROZEN_FIELD(xd_ll_combine_args, expert_out, 32);
FROZEN_FIELD(xd_ll_combine_args, topk_weights, 40);
FROZEN_FIELD(xd_ll_combine_args, out, 48);
FROZEN_FIELD(xd_ll_combine_args, wait_ns, 56);
FROZEN_FIELD(xd_ll_combine_args, wire, 64);

FROZEN_ENUM(xd_gemm_operation);
FROZEN_VALUE(XD_GEMM_ALL_GATHER, 16);
FROZEN_VALUE(XD_GEMM_REDUCE_SCATTER, 17);
FROZEN_VALUE(XD_GEMM_ALL_REDUCE, 18);
FROZEN_VALUE(XD_GEMM_BULK, 19);
FROZEN_VALUE(XD_GEMM_START_ALL_GATHER, 20);

FROZEN_ENUM(xd_gemm_algo);
FROZEN_VALUE(XD_GEMM_ALGO_AUTO, 0);
FROZEN_VALUE(XD_GEMM_ALGO_DIRECT, 1);
FROZEN_VALUE(XD_GEMM_ALGO_SPLIT, 2);
FROZEN_VALUE(XD_GEMM_ALGO_SEQUENTIAL, 3);
FROZEN_VALUE(XD_GEMM_ALGO_CUBLASMP, 16);
FROZEN_VALUE(XD_GEMM_ALGO_CUBLASMP_SPLIT_P2P, 17);
FROZEN_VALUE(XD_GEMM_ALGO_CUBLASMP_SPLIT_MULTICAST, 18);
FROZEN_VALUE(XD_GEMM_ALGO_CUBLASMP_ATOMIC_P2P, 19);
FROZEN_VALUE(XD_GEMM_ALGO_CUBLASMP_ATOMIC_MULTICAST, 20);
FROZEN_VALUE(XD_GEMM_ALGO_CUBLASMP_NO_OVERLAP, 21);
FROZEN_VALUE(XD_GEMM_ALGO_CUBLASMP_FUSED, 22);

FROZEN_ENUM(xd_gemm_epilogue);
FROZEN_VALUE(XD_GEMM_EPILOGUE_NONE, 0);
FROZEN_VALUE(XD_GEMM_EPILOGUE_GELU, 1);
FROZEN_VALUE(XD_GEMM_EPILOGUE_DGELU, 2);
FROZEN_VALUE(XD_GEMM_EPILOGUE_RELU, 3);
FROZEN_VALUE(XD_GEMM_EPILOGUE_DRELU, 4);

FROZEN_SIZE(xd_gemm_config, 72);
FROZEN_FIELD(xd_gemm_config, struct_size, 0);
FROZEN_FIELD(xd_gemm_config, num_ranks, 8);
FROZEN_FIELD(xd_gemm_config, operations, 12);
FROZEN_FIELD(xd_gemm_config, max_tokens, 16);
FROZEN_FIELD(xd_gemm_config, max_k, 24);
FROZEN_FIELD(xd_gemm_config, max_n, 32);
FROZEN_FIELD(xd_gemm_config, dtype, 40);
FROZEN_FIELD(xd_gemm_config, algo, 44);
FROZEN_FIELD(xd_gemm_config, num_comm_sms, 48);
FROZEN_FIELD(xd_gemm_config, keep_gathered, 52);
FROZEN_FIELD(xd_gemm_config, allow_fallback, 56);
FROZEN_FIELD(xd_gemm_config, device_type, 60);
FROZEN_FIELD(xd_gemm_config, nccl_comm, 64);

FROZEN_SIZE(xd_gemm_memory, 24);
FROZEN_FIELD(xd_gemm_memory, struct_size, 0);
FROZEN_FIELD(xd_gemm_memory, symmetric_bytes, 8);
FROZEN_FIELD(xd_gemm_memory, private_bytes, 16);

FROZEN_SIZE(xd_gemm_status, 288);
FROZEN_FIELD(xd_gemm_status, struct_size, 0);
FROZEN_FIELD(xd_gemm_status, status, 8);
FROZEN_FIELD(xd_gemm_status, operation, 12);
FROZEN_FIELD(xd_gemm_status, epoch, 16);
FROZEN_FIELD(xd_gemm_status, rank, 24);
FROZEN_FIELD(xd_gemm_status, text, 28);

FROZEN_SIZE(xd_gemm_args, 168);
FROZEN_FIELD(xd_gemm_args, struct_size, 0);
FROZEN_FIELD(xd_gemm_args, a, 8);
FROZEN_FIELD(xd_gemm_args, b, 16);
FROZEN_FIELD(xd_gemm_args, d, 24);
FROZEN_FIELD(xd_gemm_args, c, 32);
FROZEN_FIELD(xd_gemm_args, transpose_a, 40);
FROZEN_FIELD(xd_gemm_args, transpose_b, 44);
FROZEN_FIELD(xd_gemm_args, alpha, 48);
FROZEN_FIELD(xd_gemm_args, beta, 52);
FROZEN_FIELD(xd_gemm_args, bias, 56);
FROZEN_FIELD(xd_gemm_args, epilogue, 64);
FROZEN_FIELD(xd_gemm_args, pre_activation, 72);
FROZEN_FIELD(xd_gemm_args, bias_grad, 80);
FROZEN_FIELD(xd_gemm_args, reduce_bias_grad, 88);
FROZEN_FIELD(xd_gemm_args, a_scale, 96);
FROZEN_FIELD(xd_gemm_args, b_scale, 104);
FROZEN_FIELD(xd_gemm_args, d_scale, 112);
FROZEN_FIELD(xd_gemm_args, d_amax, 120);
FROZEN_FIELD(xd_gemm_args, fast_accumulate, 128);
FROZEN_FIELD(xd_gemm_args, allow_tf32, 132);
FROZEN_FIELD(xd_gemm_args, gathered, 136);
FROZEN_FIELD(xd_gemm_args, gathered_scale, 144);
FROZEN_FIELD(xd_gemm_args, tokens_per_rank, 152);
FROZEN_FIELD(xd_gemm_args, algo, 160);
FROZEN_FIELD(xd_gemm_args, tag, 164);

FROZEN_SIZE(xd_gemm_bulk_args, 56);
FROZEN_FIELD(xd_gemm_bulk_args, struct_size, 0);
FROZEN_FIELD(xd_gemm_bulk_args, product, 8);
FROZEN_FIELD(xd_gemm_bulk_args, collective, 16);
FROZEN_FIELD(xd_gemm_bulk_args, in, 24);
FROZEN_FIELD(xd_gemm_bulk_args, out, 32);
FROZEN_FIELD(xd_gemm_bulk_args, tokens_per_rank, 40);
FROZEN_FIELD(xd_gemm_bulk_args, tag, 48);

FROZEN_SIZE(xd_gemm_gather_args, 40);
FROZEN_FIELD(xd_gemm_gather_args, struct_size, 0);
FROZEN_FIELD(xd_gemm_gather_args, in, 8);
FROZEN_FIELD(xd_gemm_gather_args, out, 16);
FROZEN_FIELD(xd_gemm_gather_args, tokens_per_rank, 24);
FROZEN_FIELD(xd_gemm_gather_args, tag, 32);

FROZEN_SIZE(xd_gemm_view, 48);
FROZEN_FIELD(xd_gemm_view, struct_size, 0);
FROZEN_FIELD(xd_gemm_view, data, 8);
FROZEN_FIELD(xd_gemm_view, rows, 16);
FROZEN_FIELD(xd_gemm_view, columns, 24);
FROZEN_FIELD(xd_gemm_view, pitch_bytes, 32);
FROZEN_FIELD(xd_gemm_view, dtype, 40);

FROZEN_SIZE(xd_gemm_plan_info, 1072);
FROZEN_FIELD(xd_gemm_plan_info, struct_size, 0);
FROZEN_FIELD(xd_gemm_plan_info, algo, 8);
FROZEN_FIELD(xd_gemm_plan_info, num_products, 12);
FROZEN_FIELD(xd_gemm_plan_info, same_bits, 16);
FROZEN_FIELD(xd_gemm_plan_info, estimate_us, 24);
FROZEN_FIELD(xd_gemm_plan_info, gemm_us, 32);
FROZEN_FIELD(xd_gemm_plan_info, transfer_us, 40);
FROZEN_FIELD(xd_gemm_plan_info, text, 48);

FROZEN_ENUM(xd_ep_quantise);
FROZEN_VALUE(XD_EP_QUANTISE_NONE, 0);
FROZEN_VALUE(XD_EP_QUANTISE_FP8_BLOCK128, 1);
FROZEN_VALUE(XD_EP_QUANTISE_FP8_BLOCK128_POW2, 2);
FROZEN_VALUE(XD_EP_QUANTISE_FP8_BLOCK128_E8M0, 3);
FROZEN_VALUE(XD_EP_QUANTISE_MXFP8, 4);

FROZEN_ENUM(xd_ep_wire);
FROZEN_VALUE(XD_EP_WIRE_SAME, 0);
FROZEN_VALUE(XD_EP_WIRE_FLOAT32, 1);
FROZEN_VALUE(XD_EP_WIRE_FP8_BLOCK128, 2);
FROZEN_VALUE(XD_EP_WIRE_FP8_BLOCK128_POW2, 3);
FROZEN_VALUE(XD_EP_WIRE_FP8_BLOCK128_E8M0, 4);

#include "frozen_placement.h"
#include "frozen_stats.h"
#include "frozen_view.h"

#endif /* CROSSDOCK_TESTS_ABI_FROZEN_H_ */
