/* Crossdock: expert parallelism under TransformerEngine's names (its transformer_engine/ep.h).
 *
 * A program that was written for TransformerEngine's nvte_ep_* functions compiles with Crossdock's
 * folder include/crossdock/compat in the place of TransformerEngine's include path, and links with
 * libcrossdock. All functions are in this header; TransformerEngine and NCCL are not needed. The
 * interface is that of TransformerEngine 2.20; docs/transformer_engine.md goes through it function
 * by function.
 *
 * Different here:
 *   - Ranks may also be on the CPU: pass crossdock::te::as_nccl(comm), of an xd_comm, as ep_comm.
 *     The stream is not used there, and calls have finished when they return.
 *   - One group per process (there: one per local device). Calls take turns.
 *   - Errors are crossdock::te::Error, a std::runtime_error with a status. An error that an
 *     operation meets finishes the group on all ranks (XD_EP_ON_ERROR_FATAL), as a trap does there,
 *     but the process lives: after nvte_ep_shutdown, nvte_ep_initialize works again (with another
 *     communicator, if it was an xd_comm). An error that a device finds, such as an overflow, is
 *     thrown by the calls that follow, and is in xd_comm_error(crossdock::te::ep_comm()).
 *   - handle_mem is a plan of Crossdock's: plain bytes at a multiple of 16, which may be copied.
 *     Nothing is cached by its address (NVTE_EP_HANDLE_CACHE_SIZE has no meaning).
 *   - Rows in a slab are in the order of source rank, then token, in every mode.
 *   - Receive tensors need room for the rows that come, not for max_recv_tokens_per_rank.
 *   - Ids that are -1 stand for no expert; ids out of range are an error (there: memory is
 *     overwritten). Of an id that is repeated in a row the first mention counts.
 *   - A rank may have no token, and may receive no row.
 *   - Windows: see te_comm_window.h. Tensors in symmetric memory are used in place with and without
 *     a window, whatever zero_copy says. Others are copied through staging memory, which the group
 *     has unless zero_copy is 1 and ep_comm is as_nccl of an xd_comm: there they are refused.
 *     Memory in a window of NCCL's is in symmetric memory only once its allocation has been given
 *     to xd_mem_register of ep_comm().
 *   - dispatch_output_per_expert_alignment is at most max_recv_tokens_per_rank, and in eager mode
 *     XD_TE_EAGER_ALIGNMENT. As there, max_recv_tokens_per_rank is equal on all ranks.
 *   - nvte_ep_dispatch and nvte_ep_combine_bwd also take rows of bytes, which are only moved. As
 *     there, fp8 rows have the scales of MXFP8.
 */
#ifndef CROSSDOCK_COMPAT_TE_EP_H_
#define CROSSDOCK_COMPAT_TE_EP_H_

#ifdef TRANSFORMER_ENGINE_EP_H_
#error "TransformerEngine's own ep.h is included already: put Crossdock's compat folder before it"
#endif

#include <crossdock/compat/te_comm.h>
#include <crossdock/compat/te_operand.h>
#include <crossdock/ep.h>

#include <mutex>

/* The largest dispatch_output_per_expert_alignment in eager mode (max_recv_tokens_per_rank = 0): a
 * power of two. Memory for so much padding of every local expert is taken. */
#ifndef XD_TE_EAGER_ALIGNMENT
#define XD_TE_EAGER_ALIGNMENT 128
#endif

/* ---- Types ----------------------------------------------------------------------------------- */

typedef struct {
  size_t struct_size;
  int ep_size;
  int num_experts;
  int max_tokens_per_rank;
  int max_recv_tokens_per_rank;
  int hidden_dim;
  int num_comm_sms;
  NVTEDType max_token_dtype;
  int zero_copy;
  /* struct_size = 0 stands for the fields up to here. */
  int num_topk;
  int drop_on_overflow;
} NVTEEpGroupConfig;

typedef struct {
  size_t struct_size;
  int top_k;
  size_t dispatch_output_per_expert_alignment;
} NVTEEpLayerConfig;

#define NVTE_EP_GROUP_CONFIG_INIT \
  { sizeof(NVTEEpGroupConfig), 0, 0, 0, 0, 0, 0, kNVTEByte, 0, 0, 0 }
#define NVTE_EP_LAYER_CONFIG_INIT \
  { sizeof(NVTEEpLayerConfig), 0, 0 }

/* ---- The group of this process --------------------------------------------------------------- */

namespace crossdock::te {
namespace detail {

struct EpState {
  std::mutex mutex;
  Comm comm;
  xd_ep_group* group;
  xd_ep_config config;
};

/* One for a program and all libraries that it is linked with. It is not destroyed when the program
 * ends: streams of the program may still be running then. */
__attribute__((visibility("default"))) inline EpState& ep_state() {
  static EpState* const state = new EpState{};
  return *state;
}

/* A config as the caller's version of the header has it. Bytes beyond this header's version must be
 * zero: they ask for something unknown. */
template <class Config>
Config read_config(const std::string& name, const Config* given, size_t base_bytes) {
  require(given != nullptr, name + " = NULL");
  const size_t bytes = given->struct_size == 0 ? base_bytes : given->struct_size;
  const std::string size = name + ".struct_size = " + std::to_string(bytes);
  require(bytes >= base_bytes, size + ", expected 0 or at least " + std::to_string(base_bytes));
  const auto* const raw = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(Config); i < bytes; ++i) {
    require(raw[i] == 0, size + ": a field is set that this header does not know");
  }
  Config config{};
  std::memcpy(static_cast<void*>(&config), raw, std::min(bytes, sizeof(Config)));
  return config;
}

inline NVTEEpLayerConfig read_layer(const NVTEEpLayerConfig* given, const xd_ep_config& group) {
  const NVTEEpLayerConfig layer = read_config("layer_cfg", given, sizeof(NVTEEpLayerConfig));
  require(layer.top_k >= 1 && layer.top_k <= group.max_topk,
          "layer_cfg.top_k = " + std::to_string(layer.top_k) + ", expected 1 to the group's " +
              std::to_string(group.max_topk));
  const size_t alignment = layer.dispatch_output_per_expert_alignment;
  require((alignment & (alignment - 1)) == 0 && alignment <= static_cast<size_t>(group.alignment),
          "layer_cfg.dispatch_output_per_expert_alignment = " + std::to_string(alignment) +
              ", expected 0 or a power of two up to " + std::to_string(group.alignment));
  return layer;
}

/* The largest power of two up to `bound`, and up to the largest alignment of a group. */
inline int32_t largest_alignment(int32_t bound) {
  int32_t alignment = 1;
  while (alignment <= bound / 2 && alignment < (1 << 20)) alignment *= 2;
  return alignment;
}

inline xd_ep_config translate(const NVTEEpGroupConfig& given) {
  const bool eager = given.max_recv_tokens_per_rank == 0;
  require(given.max_recv_tokens_per_rank >= 0, "group_config.max_recv_tokens_per_rank = " +
                                                   std::to_string(given.max_recv_tokens_per_rank) +
                                                   ", expected 0 or more");
  const char* const with = " with group_config.max_recv_tokens_per_rank = 0, expected 0 with it";
  require(!eager || given.zero_copy == 0, std::string("group_config.zero_copy = 1") + with);
  require(!eager || given.drop_on_overflow == 0,
          std::string("group_config.drop_on_overflow = 1") + with);
  require(!eager || given.num_topk > 0,
          "group_config.num_topk = 0 with group_config.max_recv_tokens_per_rank = 0, expected it");
  require(given.ep_size > 0, "group_config.ep_size = " + std::to_string(given.ep_size) +
                                 ", expected the communicator's number of ranks");
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = given.ep_size;
  config.num_experts = given.num_experts;
  config.max_topk = given.num_topk != 0 ? given.num_topk : XD_EP_MAX_TOPK;
  config.max_tokens_per_rank = given.max_tokens_per_rank;
  config.hidden = given.hidden_dim;
  config.dtype = dtype_of("group_config.max_token_dtype", given.max_token_dtype);
  /* MXFP8 has a scale of one byte per 32 columns. */
  config.max_scale_bytes = given.hidden_dim / 32;
  config.alignment =
      eager ? XD_TE_EAGER_ALIGNMENT : largest_alignment(given.max_recv_tokens_per_rank);
  config.recv_capacity = given.max_recv_tokens_per_rank;
  config.overflow = given.drop_on_overflow != 0 ? XD_EP_OVERFLOW_DROP : XD_EP_OVERFLOW_ERROR;
  config.duplicate_ids = XD_EP_DUPLICATE_IDS_COLLAPSE;
  config.on_error = XD_EP_ON_ERROR_FATAL;
  config.num_sms = given.num_comm_sms;
  return config;
}

/* Programs that give NCCL's communicator have their tensors in NCCL's windows, which this library
 * does not know: they need staging memory, also with zero_copy. */
inline xd_ep_staging staging_of(const NVTEEpGroupConfig& given, const Comm& comm) {
  return given.zero_copy != 0 && !comm.owned ? XD_EP_STAGING_NONE : XD_EP_STAGING_AUTO;
}

inline void close(EpState& state) {
  xd_ep_group_destroy(state.group);
  state.group = nullptr;
  state.comm.close();
}

/* A tensor that a window may say the place of. */
class Payload : public Operand {
 public:
  Payload(const char* name, NVTETensor tensor, DLDevice device, int ndim,
          const NVTECommWindow& window)
      : Operand(name, tensor, device, ndim) {
    if (given()) move_to(address_in(window.window, window.offset, data()));
  }
};

/* The scales of rows of tokens; not given where the rows have none. */
class Scales : public Operand {
 public:
  Scales(const char* name, NVTETensor tensor, DLDevice device, const NVTECommWindow& window) {
    if (tensor == nullptr) return;
    const NVTEScalingMode mode = nvte_tensor_scaling_mode(tensor);
    const NVTEDType type = nvte_tensor_type(tensor);
    const bool is_fp8 = type == kNVTEFloat8E4M3 || type == kNVTEFloat8E5M2;
    if (mode == NVTE_DELAYED_TENSOR_SCALING && !is_fp8) return;
    require(mode == NVTE_MXFP8_1D_SCALING,
            std::string(name) + ": NVTEScalingMode " + std::to_string(mode) +
                (is_fp8 ? " of fp8 rows, expected " : ", expected none or ") +
                "NVTE_MXFP8_1D_SCALING: a scale of a whole tensor would not go with the rows");
    NVTEBasicTensor scales{};
    nvte_get_tensor_param_v2(tensor, kNVTERowwiseScaleInv, &scales, sizeof(scales), nullptr);
    set(name, scales, device, 2);
    move_to(address_in(window.scale_window, window.scale_offset, data()));
  }
};

/* The bytes of a handle_mem. */
struct Handle {
  void* data;
  size_t bytes;
  explicit Handle(NVTETensor tensor) : data(nullptr), bytes(0) {
    if (tensor == nullptr) return;
    data = nvte_tensor_data(tensor);
    bytes = nvte_tensor_numel(tensor) * nvte_tensor_element_size(tensor);
  }
};

inline void require_group(const char* function, const EpState& state) {
  require(state.group != nullptr,
          std::string(function) + ": there is no group: call nvte_ep_initialize first");
}

/* Makes the call of an operation. Where its arguments cannot be translated, the peers are told in
 * place of the call, so that they do not wait for it. */
template <class Call>
void operate(const char* function, xd_ep_operation operation, cudaStream_t stream,
             const Call& call) {
  EpState& state = ep_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  require_group(function, state);
  xd_status status = XD_SUCCESS;
  try {
    status = call(state);
  } catch (const Error& error) {
    status = xd_ep_join_failed(state.group, operation, error.what(), stream);
  }
  check(function, status);
}

inline xd_status prepare(EpState& state, NVTETensor handle_mem, NVTETensor topk_idx,
                         NVTETensor counts, NVTETensor total, const NVTEEpLayerConfig* layer_cfg,
                         cudaStream_t stream) {
  const NVTEEpLayerConfig layer = read_layer(layer_cfg, state.config);
  const DLDevice device = state.comm.device;
  Operand idx("topk_idx", topk_idx, device, 2);
  Operand rows("recv_tokens_per_expert", counts, device, 1);
  Operand all_rows("total_recv_tokens_per_rank", total, device, 1);
  require(!idx.given() || idx.columns() == layer.top_k,
          "topk_idx: has " + std::to_string(idx.columns()) +
              " columns, expected top_k = " + std::to_string(layer.top_k));
  const Handle handle(handle_mem);
  xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
  args.topk_idx = idx.get();
  args.plan = handle.data;
  args.plan_bytes = handle.bytes;
  const auto alignment = static_cast<int32_t>(layer.dispatch_output_per_expert_alignment);
  args.alignment = alignment != 0 ? alignment : 1;
  args.padded_counts = rows.get();
  args.total = all_rows.get();
  return xd_ep_prepare(state.group, &args, stream);
}

struct DispatchTensors {
  NVTETensor handle_mem, tokens, topk_weights, recv_tokens, recv_topk_weights;
  NVTECommWindow tokens_win, topk_weights_win, recv_tokens_win, recv_topk_weights_win;
};

inline xd_status dispatch(EpState& state, const DispatchTensors& t, cudaStream_t stream) {
  const DLDevice device = state.comm.device;
  Payload tokens("tokens", t.tokens, device, 2, t.tokens_win);
  Payload weights("topk_weights", t.topk_weights, device, 2, t.topk_weights_win);
  Payload recv("recv_tokens", t.recv_tokens, device, 2, t.recv_tokens_win);
  Payload recv_weights("recv_topk_weights", t.recv_topk_weights, device, 1,
                       t.recv_topk_weights_win);
  Scales scales("tokens", t.tokens, device, t.tokens_win);
  Scales recv_scales("recv_tokens", t.recv_tokens, device, t.recv_tokens_win);
  const Handle handle(t.handle_mem);
  xd_ep_dispatch_args args = XD_EP_DISPATCH_ARGS_INIT;
  args.plan = handle.data;
  args.plan_bytes = handle.bytes;
  args.tokens = tokens.get();
  args.scales = scales.get();
  args.topk_weights = weights.get();
  args.recv_tokens = recv.get();
  args.recv_scales = recv_scales.get();
  args.recv_weights = recv_weights.get();
  return xd_ep_dispatch(state.group, &args, stream);
}

}  // namespace detail

/* The communicator and the group behind nvte_ep_initialize; NULL without one. They are for
 * xd_mem_alloc and xd_mem_register, xd_comm_error and xd_ep_group_status; do not destroy them. */
inline xd_comm* ep_comm() {
  detail::EpState& state = detail::ep_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.comm.comm;
}
inline xd_ep_group* ep_group() {
  detail::EpState& state = detail::ep_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.group;
}

}  // namespace crossdock::te

/* ---- Functions ------------------------------------------------------------------------------- */

extern "C" {

/* Collective. `ep_comm`: NCCL's communicator, or crossdock::te::as_nccl of one of Crossdock's. */
XD_TE_FUNCTION void nvte_ep_initialize(void* ep_comm, const NVTEEpGroupConfig* group_config) {
  using namespace crossdock::te::detail;
  constexpr const char* kName = "nvte_ep_initialize";
  const NVTEEpGroupConfig given =
      read_config("group_config", group_config, offsetof(NVTEEpGroupConfig, num_topk));
  xd_ep_config config = translate(given);
  EpState& state = ep_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  require(state.group == nullptr, std::string(kName) + ": there is a group already");
  state.comm.open(kName, ep_comm);
  config.staging = staging_of(given, state.comm);
  state.config = config;
  const xd_status status = xd_ep_group_create(state.comm.comm, &config, &state.group);
  if (status == XD_SUCCESS) return;
  try {
    check(kName, status);
  } catch (...) {
    close(state);
    throw;
  }
}

/* No operation of this rank may be running on the device any more. */
XD_TE_FUNCTION void nvte_ep_shutdown(void) {
  crossdock::te::detail::EpState& state = crossdock::te::detail::ep_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  crossdock::te::detail::close(state);
}

XD_TE_FUNCTION size_t nvte_ep_handle_mem_size(const NVTEEpLayerConfig* layer_cfg) {
  using namespace crossdock::te::detail;
  constexpr const char* kName = "nvte_ep_handle_mem_size";
  EpState& state = ep_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  require_group(kName, state);
  read_layer(layer_cfg, state.config);
  size_t bytes = 0;
  check(kName, xd_ep_plan_size(&state.config, &bytes));
  return bytes;
}

/* recv_tokens_per_expert gets numbers of rows with padding, after drops; total_recv_tokens_per_rank
 * the number of rows with padding, before drops. Either may be NULL, int32 or int64, and on CUDA in
 * pinned memory of the host. */
XD_TE_FUNCTION void nvte_ep_prepare(NVTETensor handle_mem, NVTETensor topk_idx,
                                    NVTETensor recv_tokens_per_expert,
                                    NVTETensor total_recv_tokens_per_rank,
                                    const NVTEEpLayerConfig* layer_cfg, cudaStream_t stream) {
  using namespace crossdock::te::detail;
  operate("nvte_ep_prepare", XD_EP_PREPARE, stream, [&](EpState& state) {
    return prepare(state, handle_mem, topk_idx, recv_tokens_per_expert, total_recv_tokens_per_rank,
                   layer_cfg, stream);
  });
}

/* topk_idx is not read: the plan in handle_mem has it. */
XD_TE_FUNCTION void nvte_ep_dispatch(NVTETensor handle_mem, NVTETensor topk_idx, NVTETensor tokens,
                                     NVTECommWindow tokens_win, NVTETensor topk_weights,
                                     NVTECommWindow topk_weights_win, NVTETensor recv_tokens,
                                     NVTECommWindow recv_tokens_win, NVTETensor recv_topk_weights,
                                     NVTECommWindow recv_topk_weights_win, cudaStream_t stream) {
  using namespace crossdock::te::detail;
  static_cast<void>(topk_idx);
  operate("nvte_ep_dispatch", XD_EP_DISPATCH, stream, [&](EpState& state) {
    return dispatch(state,
                    {handle_mem, tokens, topk_weights, recv_tokens, recv_topk_weights, tokens_win,
                     topk_weights_win, recv_tokens_win, recv_topk_weights_win},
                    stream);
  });
}

/* nvte_ep_prepare, then nvte_ep_dispatch. */
XD_TE_FUNCTION void nvte_ep_prepare_and_dispatch(
    NVTETensor handle_mem, NVTETensor topk_idx, NVTETensor tokens, NVTECommWindow tokens_win,
    NVTETensor topk_weights, NVTECommWindow topk_weights_win, NVTETensor recv_tokens,
    NVTECommWindow recv_tokens_win, NVTETensor recv_topk_weights,
    NVTECommWindow recv_topk_weights_win, NVTETensor recv_tokens_per_expert,
    NVTETensor total_recv_tokens_per_rank, const NVTEEpLayerConfig* layer_cfg,
    cudaStream_t stream) {
  nvte_ep_prepare(handle_mem, topk_idx, recv_tokens_per_expert, total_recv_tokens_per_rank,
                  layer_cfg, stream);
  nvte_ep_dispatch(handle_mem, topk_idx, tokens, tokens_win, topk_weights, topk_weights_win,
                   recv_tokens, recv_tokens_win, recv_topk_weights, recv_topk_weights_win, stream);
}

/* result[t] = sum of token t's rows, without weights. */
XD_TE_FUNCTION void nvte_ep_combine(NVTETensor handle_mem, NVTETensor expert_out,
                                    NVTECommWindow expert_out_win, NVTETensor result,
                                    cudaStream_t stream) {
  using namespace crossdock::te::detail;
  operate("nvte_ep_combine", XD_EP_COMBINE, stream, [&](EpState& state) {
    Payload rows("expert_out", expert_out, state.comm.device, 2, expert_out_win);
    Operand out("result", result, state.comm.device, 2);
    const Handle handle(handle_mem);
    xd_ep_combine_args args = XD_EP_COMBINE_ARGS_INIT;
    args.plan = handle.data;
    args.plan_bytes = handle.bytes;
    args.expert_out = rows.get();
    args.out = out.get();
    return xd_ep_combine(state.group, &args, stream);
  });
}

/* Either pair of tensors may be NULL. */
XD_TE_FUNCTION void nvte_ep_dispatch_bwd(NVTETensor handle_mem, NVTETensor grad,
                                         NVTECommWindow grad_win, NVTETensor g_recv_topk_weights,
                                         NVTECommWindow g_recv_topk_weights_win,
                                         NVTETensor grad_tokens, NVTETensor grad_topk_weights,
                                         cudaStream_t stream) {
  using namespace crossdock::te::detail;
  operate("nvte_ep_dispatch_bwd", XD_EP_DISPATCH_BWD, stream, [&](EpState& state) {
    const DLDevice device = state.comm.device;
    Payload rows("grad", grad, device, 2, grad_win);
    Payload weights("g_recv_topk_weights", g_recv_topk_weights, device, 1, g_recv_topk_weights_win);
    Operand tokens("grad_tokens", grad_tokens, device, 2);
    Operand token_weights("grad_topk_weights", grad_topk_weights, device, 2);
    const Handle handle(handle_mem);
    xd_ep_dispatch_bwd_args args = XD_EP_DISPATCH_BWD_ARGS_INIT;
    args.plan = handle.data;
    args.plan_bytes = handle.bytes;
    args.grad_recv_tokens = rows.get();
    args.grad_recv_weights = weights.get();
    args.grad_tokens = tokens.get();
    args.grad_topk_weights = token_weights.get();
    return xd_ep_dispatch_bwd(state.group, &args, stream);
  });
}

XD_TE_FUNCTION void nvte_ep_combine_bwd(NVTETensor handle_mem, NVTETensor grad,
                                        NVTECommWindow grad_win, NVTETensor grad_expert_out,
                                        NVTECommWindow grad_expert_out_win, cudaStream_t stream) {
  using namespace crossdock::te::detail;
  operate("nvte_ep_combine_bwd", XD_EP_COMBINE_BWD, stream, [&](EpState& state) {
    const DLDevice device = state.comm.device;
    Payload tokens("grad", grad, device, 2, grad_win);
    Payload rows("grad_expert_out", grad_expert_out, device, 2, grad_expert_out_win);
    Scales scales("grad", grad, device, grad_win);
    Scales row_scales("grad_expert_out", grad_expert_out, device, grad_expert_out_win);
    const Handle handle(handle_mem);
    xd_ep_combine_bwd_args args = XD_EP_COMBINE_BWD_ARGS_INIT;
    args.plan = handle.data;
    args.plan_bytes = handle.bytes;
    args.grad_out = tokens.get();
    args.grad_expert_out = rows.get();
    args.grad_out_scales = scales.get();
    args.grad_expert_out_scales = row_scales.get();
    return xd_ep_combine_bwd(state.group, &args, stream);
  });
}

}  // extern "C"

#endif /* CROSSDOCK_COMPAT_TE_EP_H_ */
