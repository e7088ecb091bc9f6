/* The headers and the frozen numbers as a C11 compiler sees them. */
#include "abi/frozen_moe.h"

#define XD_INITIALISED(X)                                  \
  X(xd_unique_id_config, XD_UNIQUE_ID_CONFIG_INIT)         \
  X(xd_comm_config, XD_COMM_CONFIG_INIT)                   \
  X(xd_comm_info, XD_COMM_INFO_INIT)                       \
  X(xd_error_info, XD_ERROR_INFO_INIT)                     \
  X(xd_mem_info, XD_MEM_INFO_INIT)                         \
  X(xd_ep_config, XD_EP_CONFIG_INIT)                       \
  X(xd_ep_memory, XD_EP_MEMORY_INIT)                       \
  X(xd_ep_status, XD_EP_STATUS_INIT)                       \
  X(xd_ep_prepare_args, XD_EP_PREPARE_ARGS_INIT)           \
  X(xd_ep_dispatch_args, XD_EP_DISPATCH_ARGS_INIT)         \
  X(xd_ep_combine_args, XD_EP_COMBINE_ARGS_INIT)           \
  X(xd_ep_dispatch_bwd_args, XD_EP_DISPATCH_BWD_ARGS_INIT) \
  X(xd_ep_combine_bwd_args, XD_EP_COMBINE_BWD_ARGS_INIT)   \
  X(xd_ll_config, XD_LL_CONFIG_INIT)                       \
  X(xd_ll_memory, XD_LL_MEMORY_INIT)                       \
  X(xd_ll_status, XD_LL_STATUS_INIT)                       \
  X(xd_ll_plan_info, XD_LL_PLAN_INFO_INIT)                 \
  X(xd_ll_dispatch_args, XD_LL_DISPATCH_ARGS_INIT)         \
  X(xd_ll_combine_args, XD_LL_COMBINE_ARGS_INIT)           \
  X(xd_ep_plan_info, XD_EP_PLAN_INFO_INIT)                 \
  X(xd_gated_args, XD_GATED_ARGS_INIT)                     \
  X(xd_gated_bwd_args, XD_GATED_BWD_ARGS_INIT)             \
  X(xd_grouped_product_args, XD_GROUPED_PRODUCT_ARGS_INIT) \
  X(xd_grouped_outer_args, XD_GROUPED_OUTER_ARGS_INIT)     \
  X(xd_moe_forward_args, XD_MOE_FORWARD_ARGS_INIT)         \
  X(xd_moe_backward_args, XD_MOE_BACKWARD_ARGS_INIT)       \
  X(xd_moe_memory, XD_MOE_MEMORY_INIT)                     \
  X(xd_moe_overlap, XD_MOE_OVERLAP_INIT)                   \
  X(xd_gemm_config, XD_GEMM_CONFIG_INIT)                   \
  X(xd_gemm_memory, XD_GEMM_MEMORY_INIT)                   \
  X(xd_gemm_status, XD_GEMM_STATUS_INIT)                   \
  X(xd_gemm_args, XD_GEMM_ARGS_INIT)                       \
  X(xd_gemm_bulk_args, XD_GEMM_BULK_ARGS_INIT)             \
  X(xd_gemm_gather_args, XD_GEMM_GATHER_ARGS_INIT)         \
  X(xd_gemm_view, XD_GEMM_VIEW_INIT)                       \
  X(xd_gemm_plan_info, XD_GEMM_PLAN_INFO_INIT)             \
  X(xd_stats, XD_STATS_INIT)                               \
  X(xd_stats_source, XD_STATS_SOURCE_INIT)

/* The initialisers must be constant expressions in C, and start with the struct's size. */
#define DEFINE(type, init) static const type initial_##type = init;
XD_INITIALISED(DEFINE)

/* Number of initialisers whose struct_size is not the struct's. */
int wrong_initialisers_in_c(void);
int wrong_initialisers_in_c(void) {
  int wrong = 0;
#define COUNT_WRONG(type, init) wrong += initial_##type.struct_size != sizeof(type);
  XD_INITIALISED(COUNT_WRONG)
  return wrong;
}
