/* Crossdock: products overlapped with transfers under TransformerEngine's names (its
 * transformer_engine/comm_gemm.h).
 *
 * As te_ep.h: a program that was written for these functions compiles with include/crossdock/compat
 * in the place of TransformerEngine's include path, and links with libcrossdock. cuBLASMp is not
 * needed. docs/transformer_engine.md goes through the functions and their arguments.
 *
 * Matrices are column-major there, by cuBLAS's convention, with sizes of all ranks together:
 *
 *   D (m x n) = op(A) (m x k) * op(B) (k x n)
 *
 *                             a rank has of A   of B        of D
 *   nvte_all_gather_gemm      m / P of m        n_r of n    m / P of m, all n
 *   nvte_gemm_reduce_scatter  k / P of k        k / P of k  all m, n_r of n
 *   nvte_gemm_all_reduce      k / P of k        k / P of k  all m, all n
 *
 * with n_r = nvte_comm_gemm_numroc(n). A column-major matrix is its transpose by rows, and D^T =
 * op(B)^T * op(A)^T: so n counts Crossdock's tokens, m its N, and A and B are its b and a. The
 * shapes of the tensors are by rows there, too: with transa = true, transb = false, A is [m, k], B
 * is [n, k] and D is [n, m].
 *
 * Different here:
 *   - Ranks may also be on the CPU, by crossdock::te::as_nccl(comm) of an xd_comm.
 *   - m (all_gather) and k (the others) are multiples of the number of ranks; n may be anything.
 *   - Memory is taken by the first call of a kind that is larger than those before: make such a
 *     call once before capturing a CUDA graph. It is freed with the context.
 *   - Errors are crossdock::te::Error. The context stays usable. An error that a device finds is
 *     thrown by a later call, which has then been made all the same.
 *   - algo names the nearest way that Crossdock has, or the best where that cannot run here.
 *     comm_sm_count has no effect: no multiprocessors move rows beside a product.
 *   - A bias is added once, after the sum over ranks. Its gradient, with pre_act_out, is float32;
 *     without pre_act_out it is refused.
 *   - nvte_gemm_all_reduce takes every pair of transa and transb but (true, true), and epilogues.
 */
#ifndef CROSSDOCK_COMPAT_TE_COMM_GEMM_H_
#define CROSSDOCK_COMPAT_TE_COMM_GEMM_H_

#ifdef TRANSFORMER_ENGINE_COMMON_COMM_GEMM_H_
#error "TransformerEngine's comm_gemm.h is included already: put Crossdock's compat folder first"
#endif

#include <crossdock/compat/te_comm.h>
#include <crossdock/compat/te_operand.h>
#include <crossdock/gemm.h>

#include <memory>

/* ---- Types ----------------------------------------------------------------------------------- */

typedef struct NVTECommGemmCtx NVTECommGemmCtx;

enum NVTECommGemmAlgoType {
  kNVTECommGemmAlgoDefault = 0,
  kNVTECommGemmAlgoSplitP2P = 1,
  kNVTECommGemmAlgoSplitMulticast = 2,
  kNVTECommGemmAlgoAtomicP2P = 3,
  kNVTECommGemmAlgoAtomicMulticast = 4
};

namespace crossdock::te::detail {

/* A context of Crossdock's for one operation, and what it has room for. */
struct GemmEngine {
  xd_gemm_operation operation;
  xd_gemm_config config;
  xd_gemm_context* context;

  bool has_room_for(xd_gemm_operation other, const xd_gemm_config& wanted) const {
    return operation == other && config.max_tokens >= wanted.max_tokens &&
           config.max_k >= wanted.max_k && config.max_n >= wanted.max_n &&
           config.dtype.bits >= wanted.dtype.bits;
  }
};

}  // namespace crossdock::te::detail

struct NVTECommGemmCtx {
  crossdock::te::detail::Comm comm;
  std::vector<crossdock::te::detail::GemmEngine> engines;
};

/* ---- One call -------------------------------------------------------------------------------- */

namespace crossdock::te::detail {

/* The arguments that the three functions have in common. */
struct GemmCall {
  const char* function;
  xd_gemm_operation operation;
  NVTECommGemmCtx* ctx;
  int64_t m, n, k;
  NVTETensor a, b, d, bias, pre_act;
  bool transa, transb, grad, accumulate;
  int comm_sm_count;
  cudaStream_t stream;
  NVTECommGemmAlgoType algo;

  bool gathers() const { return operation == XD_GEMM_ALL_GATHER; }
};

inline int64_t share(const Comm& comm, int64_t global, int rank) {
  int64_t local = 0;
  check("nvte_comm_gemm_numroc", xd_gemm_local_size(global, rank, comm.num_ranks, &local));
  return local;
}

inline std::string shape_text(int64_t rows, int64_t columns) {
  return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

/* Requires a matrix to be stored as [outer, inner], or as [inner, outer] unless `rows_first`. */
inline void require_shape(const char* name, const Operand& tensor, bool rows_first, int64_t outer,
                          int64_t inner) {
  const int64_t rows = rows_first ? outer : inner, columns = rows_first ? inner : outer;
  require(tensor.given(), std::string(name) + " = NULL, expected a tensor");
  require(tensor.rows() == rows && tensor.columns() == columns,
          std::string(name) + ": is " + shape_text(tensor.rows(), tensor.columns()) +
              ", expected " + shape_text(rows, columns));
}

/* A tensor without elements stands for none, as there. */
inline bool is_there(NVTETensor tensor) {
  return tensor != nullptr && nvte_tensor_data(tensor) != nullptr && nvte_tensor_numel(tensor) > 0;
}

inline bool is_fp8(NVTETensor tensor) {
  const NVTEDType type = nvte_tensor_type(tensor);
  return type == kNVTEFloat8E4M3 || type == kNVTEFloat8E5M2;
}

inline xd_gemm_algo algo_of(const GemmCall& call) {
  switch (call.algo) {
    case kNVTECommGemmAlgoDefault:
      return XD_GEMM_ALGO_AUTO;
    case kNVTECommGemmAlgoSplitP2P:
    case kNVTECommGemmAlgoSplitMulticast:
      return XD_GEMM_ALGO_SPLIT;
    case kNVTECommGemmAlgoAtomicP2P:
    case kNVTECommGemmAlgoAtomicMulticast:
      return call.gathers() ? XD_GEMM_ALGO_AUTO : XD_GEMM_ALGO_DIRECT;
  }
  refuse("algo = " + std::to_string(call.algo) + ", expected an NVTECommGemmAlgoType");
}

/* This rank's sizes, in Crossdock's terms. */
struct GemmSizes {
  int64_t tokens;   /* of `a`'s rows */
  int64_t d_tokens; /* of `d`'s rows */
  int64_t columns, inner;
  std::vector<int64_t> tokens_per_rank;
};

inline GemmSizes sizes_of(const GemmCall& call) {
  const Comm& comm = call.ctx->comm;
  require(call.m > 0 && call.n > 0 && call.k > 0,
          "m, n, k = " + std::to_string(call.m) + ", " + std::to_string(call.n) + ", " +
              std::to_string(call.k) + ", expected positive numbers");
  const int64_t spread = call.gathers() ? call.m : call.k;
  require(spread % comm.num_ranks == 0, std::string(call.gathers() ? "m" : "k") + " = " +
                                            std::to_string(spread) + ", expected a multiple of " +
                                            std::to_string(comm.num_ranks) + " ranks");
  GemmSizes sizes{};
  for (int rank = 0; rank < comm.num_ranks; ++rank) {
    sizes.tokens_per_rank.push_back(share(comm, call.n, rank));
  }
  const int64_t own = sizes.tokens_per_rank[static_cast<size_t>(comm.rank)];
  sizes.tokens = call.gathers() ? own : call.n;
  sizes.d_tokens = call.operation == XD_GEMM_REDUCE_SCATTER ? own : call.n;
  sizes.columns = call.gathers() ? call.m / comm.num_ranks : call.m;
  sizes.inner = call.gathers() ? call.k : call.k / comm.num_ranks;
  return sizes;
}

/* The smallest context that can make the call. */
inline xd_gemm_config config_for(const GemmCall& call, const GemmSizes& sizes) {
  xd_gemm_config config = XD_GEMM_CONFIG_INIT;
  config.operations = XD_GEMM_BIT(call.operation);
  config.max_tokens = share(call.ctx->comm, call.n, 0);
  config.max_k = sizes.inner;
  config.max_n = sizes.columns;
  const NVTETensor moved = call.gathers() ? call.b : call.d;
  require(moved != nullptr, std::string(call.gathers() ? "b" : "d") + " = NULL, expected a tensor");
  /* Terms of a sum over ranks are bf16 where D is fp8. */
  config.dtype =
      !call.gathers() && is_fp8(moved) ? XD_DTYPE_BFLOAT16 : dtype_of("d", nvte_tensor_type(moved));
  config.allow_fallback = 1;
  return config;
}

/* The context for the call. A new one is made, on all ranks alike, where none has room; from the
 * second on with room for more, so that growing sizes make few. */
inline xd_gemm_context* context_for(const GemmCall& call, const GemmSizes& sizes) {
  xd_gemm_config wanted = config_for(call, sizes);
  bool is_first = true;
  for (const GemmEngine& engine : call.ctx->engines) {
    if (engine.has_room_for(call.operation, wanted)) return engine.context;
    if (engine.operation != call.operation) continue;
    is_first = false;
    wanted.max_k = std::max(wanted.max_k, engine.config.max_k);
    wanted.max_n = std::max(wanted.max_n, engine.config.max_n);
    if (engine.config.dtype.bits > wanted.dtype.bits) wanted.dtype = engine.config.dtype;
  }
  int64_t room = 1;
  while (room < wanted.max_tokens) room *= 2;
  if (!is_first) wanted.max_tokens = room;
  GemmEngine engine{call.operation, wanted, nullptr};
  call.ctx->engines.reserve(call.ctx->engines.size() + 1);
  check(call.function, xd_gemm_context_create(call.ctx->comm.comm, &wanted, &engine.context));
  call.ctx->engines.push_back(engine);
  return engine.context;
}

/* The tensors of a call as Crossdock's. */
class GemmOperands {
 public:
  GemmOperands(const GemmCall& call, const GemmSizes& sizes)
      : call_(call),
        device_(call.ctx->comm.device),
        a_("b", call.b, device_, 2),
        b_("a", call.a, device_, 2),
        d_("d", call.d, device_, 2) {
    require(!(call.transa && call.transb), "transa, transb = true, true: expected one at most");
    require_shape("b", a_, !call.transb, sizes.tokens, sizes.inner);
    require_shape("a", b_, call.transa, sizes.columns, sizes.inner);
    require_shape("d", d_, true, sizes.d_tokens, sizes.columns);
    args_.a = a_.get();
    args_.b = b_.get();
    args_.d = d_.get();
    args_.transpose_a = call.transb ? 1 : 0;
    args_.transpose_b = call.transa ? 1 : 0;
    if (call.accumulate) {
      args_.c = args_.d;
      args_.beta = 1;
    }
    /* all_reduce does not read it. */
    args_.tokens_per_rank = sizes.tokens_per_rank.data();
    args_.algo = algo_of(call);
    set_scales();
    set_epilogue();
  }

  const xd_gemm_args* args() const { return &args_; }

 private:
  void set_scales() {
    for (const auto& [name, tensor] : {std::pair{"a", call_.a}, {"b", call_.b}, {"d", call_.d}}) {
      const NVTEScalingMode mode = nvte_tensor_scaling_mode(tensor);
      require(mode == NVTE_DELAYED_TENSOR_SCALING,
              std::string(name) + ": NVTEScalingMode " + std::to_string(mode) +
                  ", expected NVTE_DELAYED_TENSOR_SCALING: one scale for a tensor");
    }
    if (is_fp8(call_.a) || is_fp8(call_.b)) {
      args_.a_scale = number(a_scale_, nvte_tensor_scale_inv(call_.b));
      args_.b_scale = number(b_scale_, nvte_tensor_scale_inv(call_.a));
    }
    if (is_fp8(call_.d)) {
      args_.d_scale = number(d_scale_, nvte_tensor_scale(call_.d));
      args_.d_amax = number(d_amax_, nvte_tensor_amax(call_.d));
    }
  }

  const DLTensor* number(xd_tensor& tensor, float* value) const {
    if (value == nullptr) return nullptr;
    tensor = xd_tensor_1d(value, XD_DTYPE_FLOAT32, device_, 1);
    return xd_tensor_view(&tensor);
  }

  void set_epilogue() {
    const bool has_bias = is_there(call_.bias), has_pre_act = is_there(call_.pre_act);
    if (has_bias) {
      NVTEBasicTensor part{};
      nvte_get_tensor_param_v2(call_.bias, kNVTERowwiseData, &part, sizeof(part), nullptr);
      bias_.set("bias", part, device_, 1);
    }
    if (has_pre_act) {
      NVTEBasicTensor part{};
      nvte_get_tensor_param_v2(call_.pre_act, kNVTERowwiseData, &part, sizeof(part), nullptr);
      pre_act_.set("pre_act_out", part, device_, 2);
      args_.pre_activation = pre_act_.get();
      args_.epilogue = call_.grad ? XD_GEMM_EPILOGUE_DGELU : XD_GEMM_EPILOGUE_GELU;
    }
    if (!has_bias) return;
    if (!call_.grad) {
      args_.bias = bias_.get();
      return;
    }
    require(
        has_pre_act,
        "grad = true with bias and without pre_act_out: sums of B over k are not computed here");
    args_.bias_grad = bias_.get();
  }

  const GemmCall& call_;
  const DLDevice device_;
  Operand a_, b_, d_, bias_, pre_act_;
  xd_tensor a_scale_{}, b_scale_{}, d_scale_{}, d_amax_{};
  xd_gemm_args args_ = XD_GEMM_ARGS_INIT;
};

inline xd_status make_call(const GemmCall& call, xd_gemm_context* context,
                           const xd_gemm_args* args) {
  switch (call.operation) {
    case XD_GEMM_ALL_GATHER:
      return xd_gemm_all_gather(context, args, call.stream);
    case XD_GEMM_REDUCE_SCATTER:
      return xd_gemm_reduce_scatter(context, args, call.stream);
    default:
      return xd_gemm_all_reduce(context, args, call.stream);
  }
}

/* Throws what a device has found in an earlier call. */
inline void check_earlier(const GemmCall& call, xd_gemm_context* context) {
  xd_gemm_status earlier = XD_GEMM_STATUS_INIT;
  check(call.function, xd_gemm_context_status(context, &earlier));
  if (earlier.status == XD_SUCCESS) return;
  throw Error(earlier.status, std::string(call.function) + ": an earlier call: " +
                                  xd_status_name(earlier.status) + ": " + earlier.text);
}

inline void multiply(const GemmCall& call) {
  require(call.ctx != nullptr, std::string(call.function) + ": ctx = NULL");
  GemmSizes sizes;
  xd_gemm_context* context = nullptr;
  try {
    sizes = sizes_of(call);
    context = context_for(call, sizes);
  } catch (const Error& error) {
    throw Error(error.status(), std::string(call.function) + ": " + error.what());
  }
  xd_status status = XD_SUCCESS;
  try {
    require(call.comm_sm_count >= 0,
            "comm_sm_count = " + std::to_string(call.comm_sm_count) + ", expected 0 or more");
    const auto operands = std::make_unique<GemmOperands>(call, sizes);
    status = make_call(call, context, operands->args());
  } catch (const Error& error) {
    status = xd_gemm_join_failed(context, call.operation, error.what(), call.stream);
  }
  check(call.function, status);
  check_earlier(call, context);
}

}  // namespace crossdock::te::detail

/* ---- Functions ------------------------------------------------------------------------------- */

extern "C" {

/* Collective. `comm`: NCCL's communicator, or crossdock::te::as_nccl of one of Crossdock's. */
XD_TE_FUNCTION NVTECommGemmCtx* nvte_comm_gemm_ctx_create(ncclComm_t comm, int nranks, int rank) {
  constexpr const char* kName = "nvte_comm_gemm_ctx_create";
  auto ctx = std::make_unique<NVTECommGemmCtx>();
  ctx->comm.open(kName, comm);
  if (ctx->comm.num_ranks != nranks || ctx->comm.rank != rank) {
    const std::string place =
        std::to_string(ctx->comm.rank) + " of " + std::to_string(ctx->comm.num_ranks);
    ctx->comm.close();
    crossdock::te::detail::refuse(std::string(kName) + ": rank " + std::to_string(rank) + " of " +
                                  std::to_string(nranks) + ", expected the communicator's " +
                                  place);
  }
  return ctx.release();
}

/* No operation of this rank may be running on the device any more. NULL is allowed. */
XD_TE_FUNCTION void nvte_comm_gemm_ctx_destroy(NVTECommGemmCtx* ctx) {
  if (ctx == nullptr) return;
  for (const auto& engine : ctx->engines) xd_gemm_context_destroy(engine.context);
  ctx->comm.close();
  delete ctx;
}

XD_TE_FUNCTION int64_t nvte_comm_gemm_numroc(NVTECommGemmCtx* ctx, int64_t global_size) {
  return crossdock::te::detail::share(ctx->comm, global_size, ctx->comm.rank);
}

XD_TE_FUNCTION void nvte_all_gather_gemm(NVTECommGemmCtx* ctx, int64_t m, int64_t n, int64_t k,
                                         const NVTETensor a, const NVTETensor b, const NVTETensor d,
                                         const NVTETensor bias, const NVTETensor pre_act_out,
                                         bool transa, bool transb, bool grad, bool accumulate,
                                         int comm_sm_count, cudaStream_t main_stream,
                                         NVTECommGemmAlgoType algo) {
  crossdock::te::detail::multiply({"nvte_all_gather_gemm", XD_GEMM_ALL_GATHER, ctx, m, n, k, a, b,
                                   d, bias, pre_act_out, transa, transb, grad, accumulate,
                                   comm_sm_count, main_stream, algo});
}

XD_TE_FUNCTION void nvte_gemm_reduce_scatter(NVTECommGemmCtx* ctx, int64_t m, int64_t n, int64_t k,
                                             const NVTETensor a, const NVTETensor b,
                                             const NVTETensor d, const NVTETensor bias,
                                             const NVTETensor pre_act_out, bool transa, bool transb,
                                             bool grad, bool accumulate, int comm_sm_count,
                                             cudaStream_t main_stream, NVTECommGemmAlgoType algo) {
  crossdock::te::detail::multiply({"nvte_gemm_reduce_scatter", XD_GEMM_REDUCE_SCATTER, ctx, m, n, k,
                                   a, b, d, bias, pre_act_out, transa, transb, grad, accumulate,
                                   comm_sm_count, main_stream, algo});
}

XD_TE_FUNCTION void nvte_gemm_all_reduce(NVTECommGemmCtx* ctx, int64_t m, int64_t n, int64_t k,
                                         const NVTETensor a, const NVTETensor b, const NVTETensor d,
                                         const NVTETensor bias, const NVTETensor pre_act_out,
                                         bool transa, bool transb, bool grad, bool accumulate,
                                         int comm_sm_count, cudaStream_t main_stream,
                                         NVTECommGemmAlgoType algo) {
  crossdock::te::detail::multiply({"nvte_gemm_all_reduce", XD_GEMM_ALL_REDUCE, ctx, m, n, k, a, b,
                                   d, bias, pre_act_out, transa, transb, grad, accumulate,
                                   comm_sm_count, main_stream, algo});
}

}  // extern "C"

#endif /* CROSSDOCK_COMPAT_TE_COMM_GEMM_H_ */
