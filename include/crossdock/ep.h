/* Crossdock: expert parallelism (EP).
 *
 * A batch of tokens lies spread over W ranks, and so do the E experts: rank d holds the L = E / W
 * experts d*L .. d*L + L-1, or the group's config says which rank holds which (expert_ranks): L is
 * then a rank's own number, and may be 0. A router has chosen up to K experts for each token.
 * `dispatch` copies every token's row to the ranks that hold its experts; `combine` brings the
 * experts' results back and sums them per token; dispatch_bwd and combine_bwd are their
 * derivatives. `prepare` exchanges counts first and puts the whole routing of the batch into a
 * plan, so that each row's final place is known before a row moves.
 *
 *   xd_ep_prepare(topk_idx) -> plan
 *   xd_ep_dispatch(plan, tokens [T,H], topk_weights [T,K]) -> recv_tokens [R,H], recv_weights
 *     ... the caller's experts: recv_tokens -> expert_out [R,H]
 *   xd_ep_combine(plan, expert_out, weights [R]) -> out [T,H]
 *   xd_ep_combine_bwd(plan, grad_out, expert_out, weights)
 *     -> grad_expert_out [R,H], grad_weights [R]
 *   xd_ep_dispatch_bwd(plan, grad_recv_tokens, grad_recv_weights)
 *     -> grad_tokens [T,H], grad_topk_weights [T,K]
 *
 * Sizes: T = tokens of this rank (0 <= T <= max_tokens_per_rank; may differ per rank and call),
 * K = top-k, H = hidden, R = rows of a receive tensor (see "Receive tensors"), S = scales per row.
 *
 * Tensors are const DLTensor*. They lie on this rank's device (for a rank on the CPU that is kDLCPU
 * or kDLCUDAHost, whatever the device_id). They are C-contiguous (strides NULL or those of such a
 * tensor), except scales, which may have any strides. Tensors [T,H] and [R,H], by any name, hold
 * rows of tokens: their data is 16-byte aligned, and a row is a multiple of 16 bytes. All other
 * tensors begin at any multiple of their element's size. Data may be NULL where the tensor has no
 * elements. The pointer to the struct is const; each field says whether the elements are read (in)
 * or written (out). Inputs and outputs do not overlap.
 * On CUDA every new address, of tensors and plans, is looked up, and an address that this rank's
 * device cannot follow is INVALID_ARGUMENT. On the CPU the DLDevice of a tensor is believed: an
 * address that the host cannot follow, as of a GPU's memory under kDLCPU, ends the process.
 * Element types by DLPack code: bf16 (4), fp16 and fp32 (2), int (0), uint (1), float8_e4m3fn (10),
 * float8_e5m2 (12), float8_e8m0fnu (14), float4_e2m1fn (17, two lanes: an element is a byte of two
 * numbers), also where the DLPack header at hand has no name for them.
 *
 * Operations are collective, in one order per group, also on a rank with T = 0. They allocate
 * nothing. Every operation of a rank first tells every peer what it is about to do. If anything
 * disagrees, or a peer's arguments are bad, no row moves, all ranks get an error at once, and the
 * group stays usable (unless it was made with XD_EP_ON_ERROR_FATAL). The content of outputs after
 * an error is undefined. Waits are bounded by the communicator's timeout.
 * On CUDA a call fails as if it had not been made, and peers do not hear of it, if its stream takes
 * no work because a capture of it has been invalidated, or because another capture forbids it.
 *
 * Layouts of receive tensors:
 *   XD_EP_EXPERT_MAJOR  one row per (token, expert). Local expert e owns rows offsets[e] ..
 *                       offsets[e] + padded[e] - 1; zones follow one another; padded = count
 *                       rounded up to the plan's `alignment`. In a zone: by source rank, then
 *                       token. Padding rows are zero and have weight 0 in every output.
 *   XD_EP_RANK_MAJOR    one row per (token, rank), by source rank, then token; recv_topk_idx [R,K]
 *                       has the local expert of each k that this rank holds, else -1;
 *                       recv_weights [R,K] likewise has the weight, else 0; past the last row they
 *                       are -1 and 0. counts and offsets then describe (token, expert) pairs per
 *                       expert, for callers that permute rows themselves.
 * Rows past the last zone or row are left untouched, unless the group has `zero_tail`.
 *
 * Receive tensors need at least min(total, capacity) rows, and may have more; the capacity of a
 * plan is recv_capacity rounded down to a multiple of its alignment. All tensors named recv_*,
 * grad_recv_*, expert_out, grad_expert_out and the weights beside them are receive tensors.
 *
 * Sums have one order, so equal inputs give equal bits: on each rank the token's rows by ascending
 * k in float32, rounded once to the payload type (combine: as xd_ep_wire says); then the ranks'
 * partial sums by ascending rank, likewise. Where ranks have named hosts (xd_comm_config.host) the
 * latter are sums of each host's ranks, and those of the hosts follow by ascending host, likewise.
 * A weight multiplies its row in float32 (product rounded, then added). Rounding is to nearest,
 * ties to even, and denormal numbers count, whatever floating-point modes the calling thread is in.
 * A NaN that a sum or a product gives is the quiet one without sign and payload; a sum of one row
 * without a weight keeps its NaNs, made quiet. Elements that are only moved (dispatch's rows,
 * scales and weights, combine_bwd's rows without weights and their scales, the gradients of weights
 * in dispatch_bwd) keep every bit, also of a signalling NaN.
 *
 * Parts (EXPERT_MAJOR): operations on a plan may be called in its P parts, by all ranks from 1 to P
 * with the same tensors. Part p stands for the local experts (p-1)*L/P to p*L/P - 1 of each rank:
 *   dispatch, combine_bwd  After part p the zones of parts up to p are complete; rows of later ones
 *                          may have been written; P has those past the last zone. Others may run
 *                          between parts, among them 7 such operations in their parts.
 *   combine, dispatch_bwd  Part p reads zones of parts up to p alone, which stay as they are until
 *                          part P, which writes the outputs. Only prepare may run between.
 * A part > 1 is INVALID_ARGUMENT if it is out of order, if its tensors have other types, row sizes
 * or memory (symmetric or not), and behind any error but that of a prepare that made its plan;
 * part 1 begins anew. All bits are those of whole operations. Between machines one part works.
 */
#ifndef CROSSDOCK_EP_H_
#define CROSSDOCK_EP_H_

#include <crossdock/quantise.h>
#include <crossdock/view.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xd_ep_group xd_ep_group;

typedef enum xd_ep_layout { XD_EP_EXPERT_MAJOR = 0, XD_EP_RANK_MAJOR = 1 } xd_ep_layout;

/* The fate of a plan under which some rank would receive more rows than its capacity. */
typedef enum xd_ep_overflow {
  /* On all ranks the plan's operations move nothing and report XD_ERROR_OVERFLOW. */
  XD_EP_OVERFLOW_ERROR = 0,
  /* The last rows in zone order are dropped; combine treats them as absent. */
  XD_EP_OVERFLOW_DROP = 1
} xd_ep_overflow;

/* How an expert's second and later mentions in a row of topk_idx are taken. They count as -1 either
 * way: they have no row, and gradient 0. */
typedef enum xd_ep_duplicate_ids {
  /* They are bad ids. */
  XD_EP_DUPLICATE_IDS_ERROR = 0,
  /* They are allowed, and their weights are ignored. */
  XD_EP_DUPLICATE_IDS_COLLAPSE = 1
} xd_ep_duplicate_ids;

/* The meaning of a group's non-fatal error (bad argument, mismatch, overflow, bad ids) for the
 * communicator. */
typedef enum xd_ep_on_error {
  /* Nothing: the next call works. */
  XD_EP_ON_ERROR_STATUS = 0,
  /* The error becomes the communicator's fatal error, with the same status: on all ranks every
   * later call on the communicator fails, xd_comm_error tells why, and kernels that have been
   * enqueued behind move nothing. */
  XD_EP_ON_ERROR_FATAL = 1
} xd_ep_on_error;

typedef enum xd_ep_staging {
  /* Receive tensors outside symmetric memory are copied through memory that the group owns. */
  XD_EP_STAGING_AUTO = 0,
  /* The group has no such memory for rows: receive tensors [R,H] outside symmetric memory are
   * INVALID_ARGUMENT, but on CUDA not those that their rank alone reads (expert_out of combine_bwd,
   * in EXPERT_MAJOR also of combine, and grad_recv_tokens there). Other tensors lie anywhere. */
  XD_EP_STAGING_NONE = 1
} xd_ep_staging;

typedef enum xd_ep_operation {
  XD_EP_PREPARE = 0,
  XD_EP_DISPATCH = 1,
  XD_EP_COMBINE = 2,
  XD_EP_DISPATCH_BWD = 3,
  XD_EP_COMBINE_BWD = 4,
  /* xd_ep_group_set_placement in placement.h, xd_ep_group_enter_view in view.h. */
  XD_EP_SET_PLACEMENT = 8,
  XD_EP_ENTER_VIEW = 10
} xd_ep_operation;

/* Bounds of what follows. */
#define XD_EP_MAX_EXPERTS 65536
#define XD_EP_MAX_TOPK    32
#define XD_EP_MAX_TOKENS  67108864 /* 2^26 */
#define XD_EP_MAX_PARTS   16
/* Rows of tokens are multiples of it, and their tensors begin at one; so do plans. In bytes. */
#define XD_EP_ROW_ALIGNMENT 16

/* Sizes of one kind of EP traffic. Equal on all ranks, but for recv_capacity, staging, zero_tail
 * and num_sms (of hidden and dtype, the row's bytes are what must be equal). */
typedef struct xd_ep_config {
  size_t struct_size;
  /* W, for the pure functions below. xd_ep_group_create also takes 0 = the communicator's. */
  int32_t num_ranks;
  /* E, at most XD_EP_MAX_EXPERTS; without expert_ranks a multiple of num_ranks. */
  int32_t num_experts;
  /* Largest K, 1 to XD_EP_MAX_TOPK. */
  int32_t max_topk;
  /* Largest T, 1 to XD_EP_MAX_TOKENS. */
  int32_t max_tokens_per_rank;
  /* Largest H, in elements of `dtype`. A row of a call may have fewer bytes, never more. */
  int32_t hidden;
  /* Widest payload: {kDLBfloat, 16, 1}, {kDLFloat, 16 or 32, 1}, fp8, int8 or uint8. */
  DLDataType dtype;
  /* Largest scale row that a caller gives beside a token row, in bytes; 0 = none. Rows that
   * dispatch quantises need none of it: the room for their scales follows from hidden and dtype. */
  int32_t max_scale_bytes;
  xd_ep_layout layout;
  /* Alignment of zones, in rows: the largest that a plan may have, and the one it has if prepare
   * does not say; a power of two up to 2^20; 0 = 1 (none). */
  int32_t alignment;
  /* R of this rank: at least alignment, below 2^31 - 1; every plan rounds it down to a multiple of
   * its own alignment. 0 = xd_ep_recv_bound. The capacities of all ranks (RANK_MAJOR: times the
   * largest L) sum to less than 2^32 - 1. */
  int64_t recv_capacity;
  xd_ep_overflow overflow;
  xd_ep_duplicate_ids duplicate_ids;
  xd_ep_on_error on_error;
  xd_ep_staging staging;
  /* 1 = rows past the last one are zeroed in every receive tensor that is written. */
  int32_t zero_tail;
  /* CUDA: multiprocessors to use. 0 = the library chooses, for each call, and so few that two
   * groups fit beside one another. The CPU executor ignores it. */
  int32_t num_sms;
  /* For xd_ep_group_memory: kDLCPU (or 0) or kDLCUDA; otherwise also 0 = the communicator's. */
  int32_t device_type;
  /* [E] rank of each expert, equal on all ranks; NULL = E / W each, in order. A rank's local
   * experts are its own in ascending order of expert: local index = order among the rank's. A rank
   * may hold none (its tensors [L] are empty), or all. Experts count physically: replicas of an
   * expert are experts of their own, chosen by the caller's router. Read during the call only. */
  const int32_t* expert_ranks;
  /* Several machines: about the bytes of a rank's buffers for rows of others.
   * Each of these has 8 equal pieces of 64 to 512 KiB, or of the longest row; 0 = of 256 KiB. On
   * CPUs whose network keeps nothing of what is under way, so not over TCP, it has up to 64. */
  int64_t net_buffer_bytes;
  /* The wires that calls of combine may name beside SAME: a set of bits XD_EP_WIRE_BIT(wire), for
   * which there will be memory. CUDA devices of several machines have none: UNSUPPORTED. */
  uint32_t wire_formats;
  /* N, up to num_experts: ids in topk_idx name N logical experts, which a table places in the
   * experts of this group (placement.h); these are then slots. 0 = ids name the experts themselves.
   * CUDA: see XD_FEATURE_CUDA_PLACEMENT. */
  int64_t num_logical_experts;
  xd_ep_peer_loss on_peer_loss;
} xd_ep_config;
/* clang-format off */
#define XD_EP_CONFIG_INIT \
  {sizeof(xd_ep_config), 0, 0, 0, 0, 0, {kDLBfloat, 16, 1}, 0, XD_EP_EXPERT_MAJOR, 0, 0, \
   XD_EP_OVERFLOW_ERROR, XD_EP_DUPLICATE_IDS_ERROR, XD_EP_ON_ERROR_STATUS, \
   XD_EP_STAGING_AUTO, 0, 0, 0, NULL, 0, 0, 0, XD_EP_PEER_LOSS_FATAL}
/* clang-format on */

/* ---- Sizes ----------------------------------------------------------------------------------- */
/* These are pure functions of a config: they need no communicator and no memory, and may be called
 * from any thread. They return INVALID_ARGUMENT for a bad config. Where they depend on L they take
 * the largest L of all ranks, so that their results fit every rank. */

/* The smallest recv_capacity that no routing can overflow, in rows: EXPERT_MAJOR
 * W * max_tokens * min(K, L) and worst-case padding; RANK_MAJOR W * max_tokens rounded up to the
 * alignment. */
XD_API xd_status xd_ep_recv_bound(const xd_ep_config* config, int64_t* rows);

/* L of a rank: the number of experts that it holds. */
XD_API xd_status xd_ep_local_experts(const xd_ep_config* config, int32_t rank,
                                     int32_t* num_local_experts);

/* Bytes of a plan: at most 4*T*K + 12*R + a term of W and E, with T, K and R at their bounds. */
XD_API xd_status xd_ep_plan_size(const xd_ep_config* config, size_t* bytes);

typedef struct xd_ep_memory {
  size_t struct_size;
  /* Memory shared with the peers: flags, counts and staging, that of weights, indices and scales
   * included. */
  size_t symmetric_bytes;
  /* The part of it that staging = NONE would save. */
  size_t staging_bytes;
  /* Working memory of this rank. */
  size_t private_bytes;
} xd_ep_memory;
#define XD_EP_MEMORY_INIT \
  { sizeof(xd_ep_memory), 0, 0, 0 }

/* Computes the memory that a group with this config will take on one rank, to within a page and a
 * few kilobytes of handles, and without links to other machines (docs/ep-semantics.md). */
XD_API xd_status xd_ep_group_memory(const xd_ep_config* config, xd_ep_memory* memory);

/* ---- Groups ---------------------------------------------------------------------------------- */

/* Makes a group: allocates, maps and exchanges all that its operations will need (a group has
 * memory of its own, beside the heap). Collective, blocking. A communicator may have many groups.
 * Errors: INVALID_ARGUMENT on the rank with a bad argument and MISMATCH on the others; MISMATCH
 * naming where configs differ; UNSUPPORTED between machines without libfabric, on CUDA with hosts
 * on one; OUT_OF_MEMORY; the fatal ones. On error *group is NULL. */
XD_API xd_status xd_ep_group_create(xd_comm* comm, const xd_ep_config* config, xd_ep_group** group);

/* Frees. Local, bounded; before or after xd_comm_destroy; not while an operation of this rank is
 * running (on CUDA it waits at most 2 seconds for one that runs all the same, or never gives its
 * memory back). NULL is allowed. */
XD_API xd_status xd_ep_group_destroy(xd_ep_group* group);

typedef struct xd_ep_status {
  size_t struct_size;
  /* Status of the error; XD_SUCCESS = there is none. */
  xd_status status;
  /* The operation that met the error. */
  xd_ep_operation operation;
  /* Number of that operation in the group, from 1. CUDA, for mistakes that the call itself found:
   * the number of the call, not counting replays of graphs. */
  uint64_t epoch;
  /* The lowest rank that the error is about; -1 = none. */
  int32_t rank;
  /* Expert ids out of range or (DUPLICATE_IDS_ERROR) repeated in a row, over all ranks, in plans
   * made since. */
  int64_t bad_ids;
  /* OVERFLOW: padded rows that `rank` would have received, and its capacity in that plan. */
  int64_t needed_rows;
  int64_t capacity_rows;
  /* Rows that this rank did not receive under XD_EP_OVERFLOW_DROP, in plans made since. */
  int64_t dropped_rows;
  char text[256];
  /* Choices of this rank whose logical expert had no slot, or whose expert is on a rank that the
   * group goes on without, in plans made since, on CUDA also in prepares that made none: they count
   * as -1. */
  int64_t unplaced_choices;
} xd_ep_status;
/* clang-format off */
#define XD_EP_STATUS_INIT \
  {sizeof(xd_ep_status), XD_SUCCESS, XD_EP_PREPARE, 0, -1, 0, 0, 0, 0, {0}, 0}
/* clang-format on */

/* Reads and clears what the group remembers. This is the first non-fatal error (overflow, bad ids,
 * mismatch, a plan that does not fit) that an operation met after its call had returned XD_SUCCESS,
 * and the bad ids, dropped rows and unplaced choices of all plans. An error that a call has
 * returned is not told again here: on the CPU, where calls return all of them, that leaves the
 * numbers. Never blocks. Any thread. */
XD_API xd_status xd_ep_group_status(xd_ep_group* group, xd_ep_status* status);

/* The error of its own that the calling thread's last operation (or xd_ep_join_failed) returned, as
 * numbers; xd_last_error() has its text. This may be an error that finishes the communicator under
 * XD_EP_ON_ERROR_FATAL; errors that later calls return because of it are not. status->status =
 * XD_SUCCESS if the call returned none. Never blocks. */
XD_API xd_status xd_ep_last_error(xd_ep_status* status);

/* A word that counts the operations of this rank that have ended with an error of their own,
 * returned ones and others; it only grows. It is for hosts that want to hear of errors without a
 * call into the library: a look costs a read of host memory (CUDA: pinned, written by the kernel
 * that reports). Load it with acquire (`__atomic_load_n(word, __ATOMIC_ACQUIRE)`): a thread that
 * sees n finds in xd_ep_group_status what the n-th error left there. Any thread may look, until the
 * group is destroyed. An error of an operation counts also where config.on_error makes it fatal.
 * Other fatal errors (timeouts, lost peers, aborts, a busy group) do not: see xd_comm_error. */
XD_API xd_status xd_ep_group_watch(xd_ep_group* group, const volatile uint64_t** word);

/* ---- Operations ------------------------------------------------------------------------------ */

/* A plan is the routing of one batch as plain bytes in the caller's memory (on the rank's device).
 * It may be copied, moved, saved and sliced out of a larger buffer, stays constant after prepare,
 * and holds no pointer. It serves any number of operations, interleaved with those of other plans,
 * in any group of the same config (expert_ranks and the capacities of all ranks included) on the
 * same rank. It begins at a multiple of 16 bytes. */

typedef struct xd_ep_prepare_args {
  size_t struct_size;
  /* In [T,K] int32 or int64: expert of each choice; -1 = none. K is equal on all ranks, and may
   * differ from plan to plan. Ids < -1 or >= E count as -1 and as bad; so do an expert's second and
   * later mentions in a row, unless the group collapses them. In groups with logical experts all
   * this is about these, N of them. */
  const DLTensor* topk_idx;
  /* Out, plan_bytes >= xd_ep_plan_size. */
  void* plan;
  size_t plan_bytes;
  /* Alignment of this plan's zones: a power of two up to the group's, equal on all ranks;
   * 0 = the group's. */
  int32_t alignment;
  /* The outputs from here on are optional, int32 or int64 each. On CUDA they lie in this rank's
   * device memory or in pinned memory of the host (kDLCUDAHost), which the host may read when the
   * stream has passed the call. */
  /* Out [L]: rows (RANK_MAJOR: pairs) per local expert, without padding and dropped rows. */
  const DLTensor* counts;
  /* Out [L]: the same with padding; under DROP the cut zone ends at R. */
  const DLTensor* padded_counts;
  /* Out [L+1]: first row of each zone, and the end of the last. */
  const DLTensor* offsets;
  /* Out [1]: rows that this rank would need, padding included, before any drop. */
  const DLTensor* total;
  /* Out [W,W]: rows that source s puts into the receive tensor of destination d, after drops. */
  const DLTensor* rank_rows;
  /* P, equal on all ranks: up to XD_EP_MAX_PARTS and the smallest L, in RANK_MAJOR up to 1; 0 = 1,
   * whole operations only. */
  int32_t parts;
  /* In [T] int32 or int64, optional, with logical experts only: a number that takes the place of t
   * in the choice of a replica (placement.h), such as a hash of the request and the position in it:
   * then a token's replicas do not depend on its batch. Taken as 64 bits without sign. A rank's own
   * choice. */
  const DLTensor* replica_hint;
} xd_ep_prepare_args;
#define XD_EP_PREPARE_ARGS_INIT \
  { sizeof(xd_ep_prepare_args), NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL, 0, NULL }

/* Exchanges counts and writes the plan. Bad expert ids anywhere: the plan is complete and usable,
 * and on every rank the status is INVALID_ARGUMENT (CPU: returned; CUDA: in xd_ep_group_status)
 * with the lowest rank and the number of bad ids. Overflow under XD_EP_OVERFLOW_ERROR: OVERFLOW,
 * likewise (and before bad ids), with rank, rows and capacity; the outputs are still written, and
 * describe whole zones. */
XD_API xd_status xd_ep_prepare(xd_ep_group* group, const xd_ep_prepare_args* args,
                               xd_stream stream);

typedef struct xd_ep_dispatch_args {
  size_t struct_size;
  const void* plan;
  size_t plan_bytes;
  /* In [T,H]: bf16, fp16, fp32, float8_e4m3fn, float8_e5m2, int8, uint8 or float4_e2m1fn_x2, of
   * which H counts bytes; bf16 to be quantised. */
  const DLTensor* tokens;
  /* In [T,S], optional: float32, float8_e8m0fnu, float8_e4m3fn or uint8, any strides; beside rows
   * of float4_e2m1fn_x2 one for 16 or for 32 numbers. NULL when quantising. */
  const DLTensor* scales;
  /* In [T,K], optional: float32. */
  const DLTensor* topk_weights;
  /* Out [R,H]: type of tokens; float8_e4m3fn when quantising. */
  const DLTensor* recv_tokens;
  /* Out [R,S]: given iff scales is given, and of its type; or as xd_ep_quantise says. Padding rows
   * have zeros, of every type. Any strides under which each element has a place of its own. */
  const DLTensor* recv_scales;
  /* Out, given iff topk_weights is given: float32, EXPERT_MAJOR [R], RANK_MAJOR [R,K]. */
  const DLTensor* recv_weights;
  /* Out [R,K], optional, RANK_MAJOR only: int32 or int64, local expert or -1. */
  const DLTensor* recv_topk_idx;
  /* Equal on all ranks. */
  xd_ep_quantise quantise;
  /* 0 = the whole operation; p = its p-th part. Equal on all ranks; 0 in RANK_MAJOR. */
  int32_t part;
  /* CUDA: multiprocessors of this call, at most config.num_sms, or if that is 0 the most that the
   * library chooses; 0 = as the group. May differ between ranks. The CPU executor ignores it. */
  int32_t num_sms;
} xd_ep_dispatch_args;
/* clang-format off */
#define XD_EP_DISPATCH_ARGS_INIT \
  {sizeof(xd_ep_dispatch_args), NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
   XD_EP_QUANTISE_NONE, 0, 0}
/* clang-format on */

/* Copies each token's row to every rank that holds one of its experts. Which optional tensors are
 * given must agree. */
XD_API xd_status xd_ep_dispatch(xd_ep_group* group, const xd_ep_dispatch_args* args,
                                xd_stream stream);

typedef struct xd_ep_combine_args {
  size_t struct_size;
  const void* plan;
  size_t plan_bytes;
  /* In [R,H]: bf16, fp16 or fp32. */
  const DLTensor* expert_out;
  /* In [R], optional, EXPERT_MAJOR only: float32, usually dispatch's recv_weights. */
  const DLTensor* weights;
  /* Out [T,H], type of expert_out: sum over the token's rows, weighted if weights are given; zero
   * for a token without rows. */
  const DLTensor* out;
  /* Both as in xd_ep_dispatch_args. */
  int32_t part;
  int32_t num_sms;
  /* SAME, or one of config.wire_formats. Equal on all ranks. */
  xd_ep_wire wire;
} xd_ep_combine_args;
/* clang-format off */
#define XD_EP_COMBINE_ARGS_INIT \
  {sizeof(xd_ep_combine_args), NULL, 0, NULL, NULL, NULL, 0, 0, XD_EP_WIRE_SAME}
/* clang-format on */

/* Sums the experts' results per token. In RANK_MAJOR a row stands for several experts and the
 * caller has reduced it already, so weights are INVALID_ARGUMENT there. */
XD_API xd_status xd_ep_combine(xd_ep_group* group, const xd_ep_combine_args* args,
                               xd_stream stream);

typedef struct xd_ep_dispatch_bwd_args {
  size_t struct_size;
  const void* plan;
  size_t plan_bytes;
  /* In [R,H], optional, with grad_tokens: bf16, fp16 or fp32. */
  const DLTensor* grad_recv_tokens;
  /* In, optional, with grad_topk_weights: float32, EXPERT_MAJOR [R], RANK_MAJOR [R,K]. */
  const DLTensor* grad_recv_weights;
  /* Out [T,H]: sum over the token's rows, in combine's order. */
  const DLTensor* grad_tokens;
  /* Out [T,K], float32: the gradient of that very choice; 0 for -1 and dropped rows. */
  const DLTensor* grad_topk_weights;
  /* Both as in xd_ep_dispatch_args. */
  int32_t part;
  int32_t num_sms;
} xd_ep_dispatch_bwd_args;
#define XD_EP_DISPATCH_BWD_ARGS_INIT \
  { sizeof(xd_ep_dispatch_bwd_args), NULL, 0, NULL, NULL, NULL, NULL, 0, 0 }

/* Derivative of dispatch. At least one of the two pairs is given. */
XD_API xd_status xd_ep_dispatch_bwd(xd_ep_group* group, const xd_ep_dispatch_bwd_args* args,
                                    xd_stream stream);

typedef struct xd_ep_combine_bwd_args {
  size_t struct_size;
  const void* plan;
  size_t plan_bytes;
  /* In [T,H]: bf16, fp16 or fp32; without weights also float8_e4m3fn, float8_e5m2, int8 or
   * uint8. */
  const DLTensor* grad_out;
  /* In [R,H], optional, with grad_weights: the tensor that combine had. */
  const DLTensor* expert_out;
  /* In [R], given iff combine was weighted, EXPERT_MAJOR only: float32. */
  const DLTensor* weights;
  /* Out [R,H]: row r of token t is weights[r] * grad_out[t], or without weights a copy of
   * grad_out[t]; padding is 0. */
  const DLTensor* grad_expert_out;
  /* Out [R], optional, float32: dot product of expert_out[r] and grad_out[t]; padding is 0. Needs
   * weights and expert_out. dispatch_bwd takes it as grad_recv_weights. */
  const DLTensor* grad_weights;
  /* In [T,S], optional, without weights only: float32, float8_e8m0fnu or uint8, up to
   * config.max_scale_bytes, any strides. */
  const DLTensor* grad_out_scales;
  /* Out [R,S], given iff grad_out_scales is given, and of its type: row t's scales beside each of
   * its rows; padding is 0. Any strides, as recv_scales. */
  const DLTensor* grad_expert_out_scales;
  /* Both as in xd_ep_dispatch_args. */
  int32_t part;
  int32_t num_sms;
} xd_ep_combine_bwd_args;
#define XD_EP_COMBINE_BWD_ARGS_INIT \
  { sizeof(xd_ep_combine_bwd_args), NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0 }

/* Derivative of combine. Rows of 8-bit elements, and rows with scales, are copied and not computed
 * with, so they take no weights: a product would need scales of its own, chosen from the products.
 * A caller with such rows and a weighted combine multiplies the arrived float32 scales, or the
 * dequantised row, by the row's weight. */
XD_API xd_status xd_ep_combine_bwd(xd_ep_group* group, const xd_ep_combine_bwd_args* args,
                                   xd_stream stream);

/* Takes this rank's turn in `operation` with a failure, for callers that find a mistake before they
 * can make the call: every peer's call returns MISMATCH naming this rank, and this call returns
 * INVALID_ARGUMENT with `text`, cut to 255 bytes. Collective with the peers' calls of
 * `operation`. */
XD_API xd_status xd_ep_join_failed(xd_ep_group* group, xd_ep_operation operation, const char* text,
                                   xd_stream stream);

/* ---- Plans ----------------------------------------------------------------------------------- */

typedef struct xd_ep_plan_info {
  size_t struct_size;
  int32_t rank;
  int32_t num_ranks;
  int32_t num_experts;
  /* T. */
  int32_t num_tokens;
  /* K. */
  int32_t topk;
  xd_ep_layout layout;
  int32_t alignment;
  /* Rows of the receive tensor in use: min(total, capacity). */
  int64_t recv_rows;
  /* Rows before any drop. */
  int64_t total_rows;
  /* recv_capacity rounded down to a multiple of alignment. */
  int64_t capacity_rows;
  /* Bad ids over all ranks, and the lowest rank that has some; -1 = none. */
  int64_t bad_ids;
  int32_t bad_id_rank;
  /* The lowest rank whose capacity is exceeded; -1 = none. */
  int32_t overflow_rank;
  /* Equal on all ranks for one batch, different for any other batch of the group. */
  uint64_t fingerprint;
  /* Number of the prepare in its group. */
  uint64_t epoch;
  /* P. */
  int32_t parts;
} xd_ep_plan_info;
/* clang-format off */
#define XD_EP_PLAN_INFO_INIT \
  {sizeof(xd_ep_plan_info), 0, 0, 0, 0, 0, XD_EP_EXPERT_MAJOR, 0, 0, 0, 0, 0, -1, -1, 0, 0, 0}
/* clang-format on */

/* Reads a plan that lies in host memory. INVALID_ARGUMENT if the bytes are no plan of prepare and
 * of this library version, cut short, or damaged in the header. Never blocks. Any thread. */
XD_API xd_status xd_ep_plan_get_info(const void* plan, size_t plan_bytes, xd_ep_plan_info* info);

/* ---- Local calls ----------------------------------------------------------------------------- */
/* Local calls concern this rank alone: no peer takes part or is waited for. They take no turn among
 * a group's operations, may be made from any thread beside these, and leave nothing in the group's
 * status. They also work after a fatal error. On CUDA they are enqueued on `stream`, and may be
 * captured. */

typedef struct xd_ep_plan_row_experts_args {
  size_t struct_size;
  /* A plan, as operations take it. */
  const void* plan;
  size_t plan_bytes;
  /* Out [rows] int32 or int64, any number of rows: local expert of each row of a receive tensor,
   * its padding included; -1 past the last zone. */
  const DLTensor* row_experts;
} xd_ep_plan_row_experts_args;
#define XD_EP_PLAN_ROW_EXPERTS_ARGS_INIT \
  { sizeof(xd_ep_plan_row_experts_args), NULL, 0, NULL }

/* Names the expert in whose zone each row lies. EXPERT_MAJOR only: a row of RANK_MAJOR stands for
 * several experts, which dispatch's recv_topk_idx names. INVALID_ARGUMENT for bytes that are no
 * plan of such a group and rank; on CUDA, where the bytes are not read before the stream comes to
 * the call, every row is -1 instead. */
XD_API xd_status xd_ep_plan_row_experts(xd_ep_group* group, const xd_ep_plan_row_experts_args* args,
                                        xd_stream stream);

typedef struct xd_ep_routing_layout_args {
  size_t struct_size;
  /* E, up to XD_EP_MAX_EXPERTS; without expert_ranks a multiple of the communicator's ranks W. */
  int32_t num_experts;
  /* In [T,K] int32 or int64, T up to 2^26, K from 1 to 32. -1 = none; an expert's second and later
   * mentions in a row, and ids < -1 or >= E, count as -1. */
  const DLTensor* topk_idx;
  /* The outputs from here on are optional. */
  /* Out [W] int32 or int64: tokens that go to each rank. */
  const DLTensor* rows_per_rank;
  /* Out [E] int32 or int64: tokens that go to each expert. */
  const DLTensor* rows_per_expert;
  /* Out [T,W] bool or uint8: 1 where the token goes to the rank. */
  const DLTensor* token_in_rank;
  /* Out [1] int32 or int64: ids < -1 or >= E. */
  const DLTensor* bad_ids;
  /* [E] in host memory, as in xd_ep_config; NULL = E / W each. Read during the call only. */
  const int32_t* expert_ranks;
} xd_ep_routing_layout_args;
#define XD_EP_ROUTING_LAYOUT_ARGS_INIT \
  { sizeof(xd_ep_routing_layout_args), 0, NULL, NULL, NULL, NULL, NULL, NULL }

/* Tells where the tokens of this rank go, without a plan. Ids are those of the E experts, never of
 * logical ones, and experts of ranks that are gone count as all others. */
XD_API xd_status xd_ep_routing_layout(xd_comm* comm, const xd_ep_routing_layout_args* args,
                                      xd_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_EP_H_ */
