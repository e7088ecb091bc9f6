/* The headers and the frozen numbers as a C11 compiler sees them. */
#include "abi/frozen.h"

/* The initialisers must be constant expressions in C, and start with the struct's size. */
static const xd_unique_id_config unique_id_config = XD_UNIQUE_ID_CONFIG_INIT;
static const xd_comm_config comm_config = XD_COMM_CONFIG_INIT;
static const xd_comm_info comm_info = XD_COMM_INFO_INIT;
static const xd_error_info error_info = XD_ERROR_INFO_INIT;
static const xd_mem_info mem_info = XD_MEM_INFO_INIT;
static const xd_ep_config ep_config = XD_EP_CONFIG_INIT;
static const xd_ep_memory ep_memory = XD_EP_MEMORY_INIT;
static const xd_ep_status ep_status = XD_EP_STATUS_INIT;
static const xd_ep_prepare_args prepare_args = XD_EP_PREPARE_ARGS_INIT;
static const xd_ep_dispatch_args dispatch_args = XD_EP_DISPATCH_ARGS_INIT;
static const xd_ep_combine_args combine_args = XD_EP_COMBINE_ARGS_INIT;
static const xd_ep_dispatch_bwd_args dispatch_bwd_args = XD_EP_DISPATCH_BWD_ARGS_INIT;
static const xd_ep_combine_bwd_args combine_bwd_args = XD_EP_COMBINE_BWD_ARGS_INIT;
static const xd_ep_ll_dispatch_args ll_dispatch_args = XD_EP_LL_DISPATCH_ARGS_INIT;
static const xd_ep_ll_combine_args ll_combine_args = XD_EP_LL_COMBINE_ARGS_INIT;
static const xd_ep_plan_info plan_info = XD_EP_PLAN_INFO_INIT;
static const xd_gemm_config gemm_config = XD_GEMM_CONFIG_INIT;
static const xd_gemm_memory gemm_memory = XD_GEMM_MEMORY_INIT;
static const xd_gemm_status gemm_status = XD_GEMM_STATUS_INIT;
static const xd_gemm_args gemm_args = XD_GEMM_ARGS_INIT;
static const xd_gemm_bulk_args gemm_bulk_args = XD_GEMM_BULK_ARGS_INIT;
static const xd_gemm_gather_args gemm_gather_args = XD_GEMM_GATHER_ARGS_INIT;
static const xd_gemm_view gemm_view = XD_GEMM_VIEW_INIT;
static const xd_gemm_plan_info gemm_plan_info = XD_GEMM_PLAN_INFO_INIT;
static const xd_stats stats = XD_STATS_INIT;
static const xd_stats_source stats_source = XD_STATS_SOURCE_INIT;

/* Number of initialisers whose struct_size is not the struct's. */
int wrong_initialisers_in_c(void);
int wrong_initialisers_in_c(void) {
  return (unique_id_config.struct_size != sizeof(xd_unique_id_config)) +
         (comm_config.struct_size != sizeof(xd_comm_config)) +
         (comm_info.struct_size != sizeof(xd_comm_info)) +
         (error_info.struct_size != sizeof(xd_error_info)) +
         (mem_info.struct_size != sizeof(xd_mem_info)) +
         (ep_config.struct_size != sizeof(xd_ep_config)) +
         (ep_memory.struct_size != sizeof(xd_ep_memory)) +
         (ep_status.struct_size != sizeof(xd_ep_status)) +
         (prepare_args.struct_size != sizeof(xd_ep_prepare_args)) +
         (dispatch_args.struct_size != sizeof(xd_ep_dispatch_args)) +
         (combine_args.struct_size != sizeof(xd_ep_combine_args)) +
         (dispatch_bwd_args.struct_size != sizeof(xd_ep_dispatch_bwd_args)) +
         (combine_bwd_args.struct_size != sizeof(xd_ep_combine_bwd_args)) +
         (ll_dispatch_args.struct_size != sizeof(xd_ep_ll_dispatch_args)) +
         (ll_combine_args.struct_size != sizeof(xd_ep_ll_combine_args)) +
         (plan_info.struct_size != sizeof(xd_ep_plan_info)) +
         (gemm_config.struct_size != sizeof(xd_gemm_config)) +
         (gemm_memory.struct_size != sizeof(xd_gemm_memory)) +
         (gemm_status.struct_size != sizeof(xd_gemm_status)) +
         (gemm_args.struct_size != sizeof(xd_gemm_args)) +
         (gemm_bulk_args.struct_size != sizeof(xd_gemm_bulk_args)) +
         (gemm_gather_args.struct_size != sizeof(xd_gemm_gather_args)) +
         (gemm_view.struct_size != sizeof(xd_gemm_view)) +
         (gemm_plan_info.struct_size != sizeof(xd_gemm_plan_info)) +
         (stats.struct_size != sizeof(xd_stats)) +
         (stats_source.struct_size != sizeof(xd_stats_source));
}
