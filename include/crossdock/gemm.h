/* Crossdock: products of matrices that are spread over the ranks (tensor and sequence parallelism),
 * with the transfer hidden behind the product.
 *
 *   xd_gemm_all_gather      D [M,N] = act(alpha * all-gather(A [m,K]) * op(B) + beta * C + bias)
 *                           a column-parallel linear layer: tokens are gathered
 *   xd_gemm_reduce_scatter  D [m,N] = this rank's rows of act(alpha * sum over ranks of
 *                           op(A [M,K]) * op(B) + beta * C + bias): a row-parallel linear layer
 *   xd_gemm_all_reduce      D [M,N] = the same sum, all rows on all ranks
 *   xd_gemm_bulk            a product of this rank alone, beside the all-gather or reduce-scatter
 *                           of another tensor
 *
 * Sizes: m = tokens of this rank (0 <= m <= max_tokens; may differ per rank and call), M = sum of m
 * over the ranks, N = columns of D, K = inner dimension, W = ranks. K and N are this rank's. A
 * caller with a layer of N_total columns over W ranks passes N = N_total / W to all_gather, and one
 * of K_total inputs K = K_total / W to reduce_scatter and all_reduce (xd_gemm_local_size). K, N,
 * types, transposes, the epilogue and allow_tf32 are equal on all ranks, which is checked. Rows of
 * gathered and scattered tensors are in rank order.
 *
 * all_reduce gives all ranks the same D. So beta, c, bias, pre_activation where it is read, and
 * d_scale must be equal on all ranks there, also in whether they are given. This is not checked: if
 * they differ, each row of D is made with those of some rank. Outputs beside D (d_amax, bias_grad,
 * pre_activation) are wanted on all ranks or on none there, which is checked.
 *
 * Tensors are const DLTensor*, as in ep.h: on this rank's device and C-contiguous. Matrices begin
 * at multiples of 16 bytes, and their rows are multiples of 16 bytes; data may be NULL where a
 * tensor has no elements. The pointer to the struct is const; each field says whether the elements
 * are read (in) or written (out). Outputs overlap nothing, except that `c` may be `d`; this is
 * checked.
 *
 * Element types: a and b are both bf16, both fp16, both fp32, or each fp8 (e4m3fn or e5m2; not both
 * e5m2). d, c and pre_activation are bf16, fp16 or fp32, d also fp8 (e4m3fn or e5m2). Products of
 * fp32 are computed in fp32 on the CPU, and on CUDA in TF32 only where `allow_tf32` says so. CPUs
 * with instructions for bf16 take numbers and products of bf16 below 2^-126 for zero.
 *
 * Sums. Each product is summed in float32, in an order of the executor's. reduce_scatter and
 * all_reduce round each rank's product (times alpha) to the type of d (bf16 where d is fp8), add
 * the W of them in float32 by ascending rank, then apply beta * C, bias and activation in float32,
 * and round once. (Hopper's tensor cores add products of fp8 with fewer bits than float32 has: 14,
 * aligned to the largest of 32 products and the sum so far; docs/gemm.md has the bound.) So bits
 * depend on inputs, sizes and W, not on the algorithm, as long as the algorithm computes its
 * product in one piece per rank of rows: explain() says so (`same_bits`). Rounding is to nearest,
 * ties to even.
 *
 * A context is one sequence of operations, as an xd_ep_group is: all ranks call the same operations
 * in the same order, also where m = 0 or a rank has nothing to do. On CUDA the caller orders
 * streams by events. Operations allocate nothing, never wait for the host, and can be captured in a
 * CUDA graph from the first call (but for those by cuBLASMp). Every operation of a rank first tells
 * every peer what it is about to do. If anything disagrees, or a peer's arguments are bad, all
 * ranks get an error, and the context stays usable. The content of outputs (d, pre_activation,
 * gathered, bias_grad, amaxes) after an error is undefined; on CUDA a product may already have been
 * enqueued behind the transfer, and then computes on whatever has come. Waits are bounded by the
 * communicator's timeout.
 *
 * Contexts need oneDNN on the CPU, and cuBLASLt on CUDA devices, which must be there when a context
 * is made.
 *
 * A request that cannot be met (here, for these sizes or types, by that algorithm) is
 * XD_ERROR_UNSUPPORTED with its reason, on every rank. Nothing is computed in another way than was
 * asked for, unless the context was made with allow_fallback.
 */
#ifndef CROSSDOCK_GEMM_H_
#define CROSSDOCK_GEMM_H_

#include <crossdock/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xd_gemm_context xd_gemm_context;

typedef enum xd_gemm_operation {
  XD_GEMM_ALL_GATHER = 16,
  XD_GEMM_REDUCE_SCATTER = 17,
  XD_GEMM_ALL_REDUCE = 18,
  XD_GEMM_BULK = 19,
  /* The gather that xd_gemm_start_all_gather begins. */
  XD_GEMM_START_ALL_GATHER = 20
} xd_gemm_operation;

/* How transfer and product are interleaved. An algorithm that does not exist for an operation,
 * or that cannot run here, is UNSUPPORTED, and the text says what it needs. */
typedef enum xd_gemm_algo {
  /* By the cost model of explain(); never one that it expects to be slower than SEQUENTIAL. */
  XD_GEMM_ALGO_AUTO = 0,
  /* CUDA, reduce_scatter: the product stores its rows straight into their owners' memory. */
  XD_GEMM_ALGO_DIRECT = 1,
  /* all_gather, and on CUDA sums: a product per rank's rows, while those of the next are under way.
   * all_gather begins with the own rows. On CUDA it may take one peer's, then the others' in
   * doubling steps (1, 1, 2, 4 ..), where the cost model expects that to be faster. */
  XD_GEMM_ALGO_SPLIT = 2,
  /* The transfer, then the product, or the other way round. */
  XD_GEMM_ALGO_SEQUENTIAL = 3,
  /* CUDA: NVIDIA's cuBLASMp multiplies and transfers, by the algorithm that it takes by itself or
   * by the one that is named; it takes these names as hints. Only in contexts that were made for it
   * (config.algo or config.nccl_comm); AUTO never takes it. Its calls return when all ranks have
   * made theirs, and cannot be captured. */
  XD_GEMM_ALGO_CUBLASMP = 16,
  XD_GEMM_ALGO_CUBLASMP_SPLIT_P2P = 17,
  /* The two named MULTICAST, and FUSED, need NVLink multicast. */
  XD_GEMM_ALGO_CUBLASMP_SPLIT_MULTICAST = 18,
  XD_GEMM_ALGO_CUBLASMP_ATOMIC_P2P = 19,
  XD_GEMM_ALGO_CUBLASMP_ATOMIC_MULTICAST = 20,
  XD_GEMM_ALGO_CUBLASMP_NO_OVERLAP = 21,
  XD_GEMM_ALGO_CUBLASMP_FUSED = 22
} xd_gemm_algo;

/* The function that makes D of the sum, before D is rounded. x = alpha * sum + beta * C + bias. */
typedef enum xd_gemm_epilogue {
  /* D = x */
  XD_GEMM_EPILOGUE_NONE = 0,
  /* D = gelu(x) = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) */
  XD_GEMM_EPILOGUE_GELU = 1,
  /* D = x * gelu'(pre_activation) */
  XD_GEMM_EPILOGUE_DGELU = 2,
  /* D = max(x, 0) */
  XD_GEMM_EPILOGUE_RELU = 3,
  /* D = x where pre_activation > 0, else 0 */
  XD_GEMM_EPILOGUE_DRELU = 4
} xd_gemm_epilogue;

/* ---- Contexts -------------------------------------------------------------------------------- */

/* The bit of an operation in xd_gemm_config.operations. */
#define XD_GEMM_BIT(operation) (1 << ((operation)-XD_GEMM_ALL_GATHER))

/* Bounds of what a context is used for. Equal on all ranks, but for num_comm_sms in contexts that
 * are not made for cuBLASMp, and nccl_comm, which all ranks give or none. */
typedef struct xd_gemm_config {
  size_t struct_size;
  /* W, for xd_gemm_context_memory. xd_gemm_context_create also takes 0 = the communicator's. */
  int32_t num_ranks;
  /* The operations, as a sum of XD_GEMM_BIT: memory is taken for these, the others are
   * UNSUPPORTED. start_all_gather needs the bit of the operation it serves, and its own. 0 =
   * all_gather, reduce_scatter and all_reduce. */
  int32_t operations;
  /* Largest m of a rank, 1 to 2^26; all_reduce: M <= W * max_tokens. */
  int64_t max_tokens;
  /* Largest row that is gathered, in elements (K of all_gather; columns of what bulk gathers). On
   * CUDA products with this K are measured, also where sums alone are computed. */
  int64_t max_k;
  /* Largest row that is summed over ranks, in elements (N of reduce_scatter and all_reduce; columns
   * of what bulk reduces), and largest N of all_gather. */
  int64_t max_n;
  /* Widest element that is transferred: {kDLBfloat, 16, 1}, {kDLFloat, 16 or 32, 1}, or fp8. */
  DLDataType dtype;
  /* For calls that say AUTO; equal on all ranks. One of CUBLASMP makes the context for cuBLASMp:
   * where it cannot run, creation is UNSUPPORTED with what is missing, unless allow_fallback. */
  xd_gemm_algo algo;
  /* CUDA: multiprocessors that a kernel may take which moves or sums rows over the ranks, or waits
   * for them; 0 = all. Products take them all, before such a kernel or after it, and copy engines
   * take none. cuBLASMp: so many move rows beside the product, which gets the rest; 0 = as it
   * likes. */
  int32_t num_comm_sms;
  /* 1 = the rows that all_gather gathered stay in the context until its next operation:
   * xd_gemm_gathered. */
  int32_t keep_gathered;
  /* 1 = a call whose algorithm cannot run takes AUTO instead of failing. */
  int32_t allow_fallback;
  /* For xd_gemm_context_memory: kDLCPU (or 0) or kDLCUDA. xd_gemm_context_create also takes 0 = the
   * communicator's. */
  int32_t device_type;
  /* CUDA: an ncclComm_t of the same ranks in the same order, with which cuBLASMp transfers. It
   * makes the context for cuBLASMp; the caller lends it until the context has been destroyed, and
   * uses it for nothing else meanwhile. It is never freed here, but revoked (ncclCommRevoke) where
   * an error finishes the xd_comm while a product is under way. NULL = cuBLASMp gets a communicator
   * of its own. */
  void* nccl_comm;
} xd_gemm_config;
/* clang-format off */
#define XD_GEMM_CONFIG_INIT \
  {sizeof(xd_gemm_config), 0, 0, 0, 0, 0, {kDLBfloat, 16, 1}, XD_GEMM_ALGO_AUTO, 0, 0, 0, 0, NULL}
/* clang-format on */

typedef struct xd_gemm_memory {
  size_t struct_size;
  /* Memory shared with the peers: flags, gathered rows, partial sums. */
  size_t symmetric_bytes;
  /* Working memory of this rank: products before they are summed, workspace of the library that
   * computes them. */
  size_t private_bytes;
} xd_gemm_memory;
#define XD_GEMM_MEMORY_INIT \
  { sizeof(xd_gemm_memory), 0, 0 }

/* Computes the memory that a context with this config takes on one rank, to within a page and a few
 * kilobytes of handles, and without the memory of cuBLASMp and NCCL. A pure function.
 * INVALID_ARGUMENT for a bad config. */
XD_API xd_status xd_gemm_context_memory(const xd_gemm_config* config, xd_gemm_memory* memory);

/* This rank's share where `global` rows or columns are dealt out: ceil(global / W) for each rank,
 * fewer for the last ones. A pure function. INVALID_ARGUMENT unless 0 <= rank < num_ranks and
 * global >= 0. */
XD_API xd_status xd_gemm_local_size(int64_t global, int32_t rank, int32_t num_ranks,
                                    int64_t* local);

/* Makes a context: allocates, maps and exchanges all that its operations will need, loads every
 * kernel that they may launch, and measures which ones are fastest. Collective, blocking. Many
 * contexts may live on one communicator, beside groups.
 * Errors: as xd_ep_group_create; UNSUPPORTED where this build or machine cannot. On error *context
 * is NULL. */
XD_API xd_status xd_gemm_context_create(xd_comm* comm, const xd_gemm_config* config,
                                        xd_gemm_context** context);

/* Frees. As xd_ep_group_destroy; on CUDA the operations that it waits for end with all that they
 * have enqueued, their products included. (Of graphs it sees the turns alone.) NULL is allowed. */
XD_API xd_status xd_gemm_context_destroy(xd_gemm_context* context);

typedef struct xd_gemm_status {
  size_t struct_size;
  /* Status of the error; XD_SUCCESS = there is none. */
  xd_status status;
  xd_gemm_operation operation;
  /* Number of that operation in the context, from 1; see xd_ep_status. */
  uint64_t epoch;
  /* The lowest rank that the error is about; -1 = none. */
  int32_t rank;
  char text[256];
} xd_gemm_status;
#define XD_GEMM_STATUS_INIT                                              \
  {                                                                      \
    sizeof(xd_gemm_status), XD_SUCCESS, XD_GEMM_ALL_GATHER, 0, -1, { 0 } \
  }

/* Reads and clears the first non-fatal error that an operation met after its call had returned
 * XD_SUCCESS. Never blocks. Any thread. */
XD_API xd_status xd_gemm_context_status(xd_gemm_context* context, xd_gemm_status* status);

/* The error of its own that the calling thread's last operation (or xd_gemm_join_failed) returned,
 * as numbers; xd_last_error() has its text. As xd_ep_last_error. */
XD_API xd_status xd_gemm_last_error(xd_gemm_status* status);

/* A word that counts the operations of this rank that have ended with an error of their own; as
 * xd_ep_group_watch. */
XD_API xd_status xd_gemm_context_watch(xd_gemm_context* context, const volatile uint64_t** word);

/* ---- Operations ------------------------------------------------------------------------------ */

/* One struct for the three operations. Each field's shape is in terms of all_gather; where the
 * others differ, they are named (RS: reduce_scatter, AR: all_reduce). Optional fields are NULL or 0
 * where they are not wanted. */
typedef struct xd_gemm_args {
  size_t struct_size;
  /* In [m,K], RS and AR [M,K]; with transpose_a stored as [K,m] or [K,M]. */
  const DLTensor* a;
  /* In [K,N]; with transpose_b stored as [N,K], as weights of linear layers are. */
  const DLTensor* b;
  /* Out [M,N], RS [m,N]. */
  const DLTensor* d;
  /* In, optional, shape and type of d (bf16 where d is fp8): added beta times. It may be d. Not
   * read where beta = 0. */
  const DLTensor* c;
  /* How a and b are stored: rows of D are tokens always. Not both of transpose_a = 1 and
   * transpose_b = 1. fp8 on CUDA: 0 and 1. */
  int32_t transpose_a, transpose_b;
  /* Factors; beta is not read without c. */
  float alpha, beta;
  /* In [N], optional: type of d (bf16 where d is fp8) or float32. Added once, after the sum over
   * ranks. */
  const DLTensor* bias;
  xd_gemm_epilogue epilogue;
  /* Shape of d. GELU, RELU: out, optional, x before the activation. DGELU, DRELU: in. */
  const DLTensor* pre_activation;
  /* Out [N] float32, optional: column sums over this rank's rows of D, before they are multiplied
   * by d_scale and rounded. */
  const DLTensor* bias_grad;
  /* 1 = bias_grad is summed over the ranks, by ascending rank. AG and RS: each rank's N columns are
   * summed with those of the same index. AR: UNSUPPORTED, as all ranks have all rows. */
  int32_t reduce_bias_grad;
  /* In, fp8 only, float32: what an element is multiplied by. [1], or one per row (a: [rows of
   * tokens], b: [N]), or one per 128 columns of K (a: [rows of tokens, ceil(K/128)], b:
   * [ceil(N/128), ceil(K/128)]). Both in the same one of these three ways; without b_scale, not
   * one per row. Scales are those of this rank's a: all_gather gathers them with the rows. On CUDA
   * those per 128 columns need cuBLASLt 12.9 or later, and a device of compute capability 9.0.
   * NULL = 1. */
  const DLTensor* a_scale;
  const DLTensor* b_scale;
  /* In [1] float32, optional, d in fp8 only: D is multiplied by it before it is rounded (with
   * saturation, also without d_scale). NULL = 1. */
  const DLTensor* d_scale;
  /* Out [1] float32, optional: the largest |D| of this rank before d_scale and rounding; 0 without
   * rows; NaN if one is. */
  const DLTensor* d_amax;
  /* fp8: 1 = sums may stay in the tensor cores' narrower accumulators. */
  int32_t fast_accumulate;
  /* fp32: 1 = CUDA may compute in TF32. Equal on all ranks. */
  int32_t allow_tf32;
  /* all_gather only. Out, optional: a of all ranks, stored as a is. [M,K], the rows of rank 0
   * first; with transpose_a [K,M], the columns of rank 0 first. On CUDA a NaN may become another
   * one. */
  const DLTensor* gathered;
  /* all_gather of fp8 only. Out, optional: scales of `gathered`, as a_scale with M rows; where
   * a_scale is a single number: [W], those of the ranks. */
  const DLTensor* gathered_scale;
  /* In, W values in host memory, read during the call: m of every rank, equal on all ranks. NULL =
   * equal shares: all ranks have m = M / W tokens. all_reduce does not read it. */
  const int64_t* tokens_per_rank;
  /* AUTO = the context's. Equal on all ranks. */
  xd_gemm_algo algo;
  /* Any number that names the product, for example its layer. Equal on all ranks: where they come
   * to products of equal shapes in another order, tags make that a MISMATCH, which would give wrong
   * results without. Of the product of xd_gemm_bulk it is not read. */
  uint32_t tag;
} xd_gemm_args;
/* clang-format off */
#define XD_GEMM_ARGS_INIT \
  {sizeof(xd_gemm_args), NULL, NULL, NULL, NULL, 0, 1, 1.0f, 0.0f, NULL, XD_GEMM_EPILOGUE_NONE, \
   NULL, NULL, 0, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL, XD_GEMM_ALGO_AUTO, 0}
/* clang-format on */

XD_API xd_status xd_gemm_all_gather(xd_gemm_context* context, const xd_gemm_args* args,
                                    xd_stream stream);
XD_API xd_status xd_gemm_reduce_scatter(xd_gemm_context* context, const xd_gemm_args* args,
                                        xd_stream stream);
XD_API xd_status xd_gemm_all_reduce(xd_gemm_context* context, const xd_gemm_args* args,
                                    xd_stream stream);

typedef struct xd_gemm_bulk_args {
  size_t struct_size;
  /* The product, of this rank alone; NULL = none. Its shapes are those of all_gather with M = m.
   * They may differ per rank, and max_tokens, max_k and max_n do not bound them: a weight's
   * gradient has neither tokens nor K as rows. It may read what the context's last operation wrote,
   * and not `out`. */
  const xd_gemm_args* product;
  /* XD_GEMM_ALL_GATHER or XD_GEMM_REDUCE_SCATTER. */
  xd_gemm_operation collective;
  /* all_gather: in [m,H] -> out [M,H], elements of any type. reduce_scatter: in [M,H] -> out [m,H],
   * bf16, fp16 or fp32, added in float32 by ascending rank, and rounded once. Rows are multiples of
   * 16 bytes; H is equal on all ranks. */
  const DLTensor* in;
  const DLTensor* out;
  /* m of every rank, as in xd_gemm_args. */
  const int64_t* tokens_per_rank;
  /* Of the transfer, as in xd_gemm_args. */
  uint32_t tag;
} xd_gemm_bulk_args;
#define XD_GEMM_BULK_ARGS_INIT \
  { sizeof(xd_gemm_bulk_args), NULL, XD_GEMM_ALL_GATHER, NULL, NULL, NULL, 0 }

/* Computes a product while another tensor is gathered or reduced. */
XD_API xd_status xd_gemm_bulk(xd_gemm_context* context, const xd_gemm_bulk_args* args,
                              xd_stream stream);

typedef struct xd_gemm_gather_args {
  size_t struct_size;
  /* In [m,H], and out [M,H], as in xd_gemm_bulk_args. */
  const DLTensor* in;
  const DLTensor* out;
  const int64_t* tokens_per_rank;
  uint32_t tag;
} xd_gemm_gather_args;
#define XD_GEMM_GATHER_ARGS_INIT \
  { sizeof(xd_gemm_gather_args), NULL, NULL, NULL, 0 }

/* Begins an all-gather that goes on beside the caller's next work. On CUDA it starts when the work
 * in `stream` has come to it, and runs on a stream of the context's; on the CPU it sends, and does
 * not wait for what the peers send. `in` and `out` are the library's until xd_gemm_wait, or an
 * operation of the context, which joins it first. While one is under way, another is BUSY, which
 * takes no turn.
 * A gather that is begun in a capture is ended in it, and one that is begun outside is ended before
 * an operation of the context is captured. Otherwise that call is BUSY, takes no turn and touches
 * nothing. A capture that comes to nothing holds neither the context nor the gather. A graph with
 * operations of the context is launched behind the gathers that were begun before: on a stream of
 * an xd_gemm_wait, or ordered behind one. */
XD_API xd_status xd_gemm_start_all_gather(xd_gemm_context* context, const xd_gemm_gather_args* args,
                                          xd_stream stream);

/* Ends what xd_gemm_start_all_gather began: on CUDA, work enqueued in `stream` from here on finds
 * `out` complete; on the CPU the call returns when it is. Any stream, of which NULL is the legacy
 * default one: the context's next operation comes behind the gather in any case. INVALID_ARGUMENT
 * for a stream that takes no work because of a capture. Success if nothing was begun. */
XD_API xd_status xd_gemm_wait(xd_gemm_context* context, xd_stream stream);

typedef struct xd_gemm_view {
  size_t struct_size;
  /* On this rank's device, valid until the context's next operation begins. As args.gathered would
   * be: [M,K], or [K,M] with transpose_a. */
  const void* data;
  int64_t rows;
  int64_t columns;
  size_t pitch_bytes;
  DLDataType dtype;
} xd_gemm_view;
#define XD_GEMM_VIEW_INIT                            \
  {                                                  \
    sizeof(xd_gemm_view), NULL, 0, 0, 0, { 0, 0, 0 } \
  }

/* Describes the rows that the last operation, an all_gather, has gathered, in a context with
 * keep_gathered. INVALID_ARGUMENT if there is none. */
XD_API xd_status xd_gemm_gathered(xd_gemm_context* context, xd_gemm_view* rows);

/* Takes this rank's turn with a failure, for a caller that found a mistake before it could make its
 * call, so that the peers learn of it at once. They get MISMATCH with `text`'s rank, and this call
 * returns INVALID_ARGUMENT with `text`. As xd_ep_join_failed. */
XD_API xd_status xd_gemm_join_failed(xd_gemm_context* context, xd_gemm_operation operation,
                                     const char* text, xd_stream stream);

/* ---- Order of calls -------------------------------------------------------------------------- */

typedef struct xd_gemm_plan_info {
  size_t struct_size;
  /* The algorithm that the call would take. */
  xd_gemm_algo algo;
  /* Products that it computes one after the other. */
  int32_t num_products;
  /* 1 = its bits are those of every other algorithm for which this is 1. */
  int32_t same_bits;
  /* Estimates, in microseconds: the whole operation, the product alone, the transfer alone. */
  double estimate_us;
  double gemm_us;
  double transfer_us;
  /* One line per algorithm of the operation: its estimate, or why it cannot run. */
  char text[1024];
} xd_gemm_plan_info;
#define XD_GEMM_PLAN_INFO_INIT                                               \
  {                                                                          \
    sizeof(xd_gemm_plan_info), XD_GEMM_ALGO_AUTO, 0, 0, 0.0, 0.0, 0.0, { 0 } \
  }

/* Says what a call with these args would do, without making it. Local: reads shapes and types, and
 * no data (which may be NULL). Errors: those that the call would return for its arguments here. */
XD_API xd_status xd_gemm_explain(xd_gemm_context* context, xd_gemm_operation operation,
                                 const xd_gemm_args* args, xd_gemm_plan_info* info);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_GEMM_H_ */
