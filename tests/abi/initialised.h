/* All structs that begin with struct_size, and their initialisers. */
#ifndef CROSSDOCK_TESTS_ABI_INITIALISED_H_
#define CROSSDOCK_TESTS_ABI_INITIALISED_H_

#define XD_INITIALISED(X)                                          \
  X(xd_unique_id_config, XD_UNIQUE_ID_CONFIG_INIT)                 \
  X(xd_comm_config, XD_COMM_CONFIG_INIT)                           \
  X(xd_comm_info, XD_COMM_INFO_INIT)                               \
  X(xd_error_info, XD_ERROR_INFO_INIT)                             \
  X(xd_mem_info, XD_MEM_INFO_INIT)                                 \
  X(xd_ep_config, XD_EP_CONFIG_INIT)                               \
  X(xd_ep_memory, XD_EP_MEMORY_INIT)                               \
  X(xd_ep_status, XD_EP_STATUS_INIT)                               \
  X(xd_ep_prepare_args, XD_EP_PREPARE_ARGS_INIT)                   \
  X(xd_ep_dispatch_args, XD_EP_DISPATCH_ARGS_INIT)                 \
  X(xd_ep_combine_args, XD_EP_COMBINE_ARGS_INIT)                   \
  X(xd_ep_dispatch_bwd_args, XD_EP_DISPATCH_BWD_ARGS_INIT)         \
  X(xd_ep_combine_bwd_args, XD_EP_COMBINE_BWD_ARGS_INIT)           \
  X(xd_ll_config, XD_LL_CONFIG_INIT)                               \
  X(xd_ll_memory, XD_LL_MEMORY_INIT)                               \
  X(xd_ll_status, XD_LL_STATUS_INIT)                               \
  X(xd_ll_plan_info, XD_LL_PLAN_INFO_INIT)                         \
  X(xd_ll_dispatch_args, XD_LL_DISPATCH_ARGS_INIT)                 \
  X(xd_ll_combine_args, XD_LL_COMBINE_ARGS_INIT)                   \
  X(xd_ep_plan_info, XD_EP_PLAN_INFO_INIT)                         \
  X(xd_gated_args, XD_GATED_ARGS_INIT)                             \
  X(xd_gated_bwd_args, XD_GATED_BWD_ARGS_INIT)                     \
  X(xd_grouped_product_args, XD_GROUPED_PRODUCT_ARGS_INIT)         \
  X(xd_grouped_outer_args, XD_GROUPED_OUTER_ARGS_INIT)             \
  X(xd_moe_forward_args, XD_MOE_FORWARD_ARGS_INIT)                 \
  X(xd_moe_backward_args, XD_MOE_BACKWARD_ARGS_INIT)               \
  X(xd_moe_memory, XD_MOE_MEMORY_INIT)                             \
  X(xd_moe_overlap, XD_MOE_OVERLAP_INIT)                           \
  X(xd_gemm_config, XD_GEMM_CONFIG_INIT)                           \
  X(xd_gemm_memory, XD_GEMM_MEMORY_INIT)                           \
  X(xd_gemm_status, XD_GEMM_STATUS_INIT)                           \
  X(xd_gemm_args, XD_GEMM_ARGS_INIT)                               \
  X(xd_gemm_bulk_args, XD_GEMM_BULK_ARGS_INIT)                     \
  X(xd_gemm_gather_args, XD_GEMM_GATHER_ARGS_INIT)                 \
  X(xd_gemm_view, XD_GEMM_VIEW_INIT)                               \
  X(xd_gemm_plan_info, XD_GEMM_PLAN_INFO_INIT)                     \
  X(xd_stats, XD_STATS_INIT)                                       \
  X(xd_stats_source, XD_STATS_SOURCE_INIT)                         \
  X(xd_comm_agree_args, XD_COMM_AGREE_ARGS_INIT)                   \
  X(xd_ep_placement, XD_EP_PLACEMENT_INIT)                         \
  X(xd_ep_placement_info, XD_EP_PLACEMENT_INFO_INIT)               \
  X(xd_ep_plan_row_experts_args, XD_EP_PLAN_ROW_EXPERTS_ARGS_INIT) \
  X(xd_ep_planner_args, XD_EP_PLANNER_ARGS_INIT)                   \
  X(xd_ep_routing_layout_args, XD_EP_ROUTING_LAYOUT_ARGS_INIT)     \
  X(xd_view, XD_VIEW_INIT)

#endif /* CROSSDOCK_TESTS_ABI_INITIALISED_H_ */
