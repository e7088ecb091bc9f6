/* Crossdock: expert parallelism for few tokens (serving, decode).
 *
 * dispatch and combine of a group of its own kind. A step is two calls, without a prepare: the
 * routing travels beside the rows, and the plan is an output of dispatch.
 *
 *   xd_ll_dispatch(tokens [T,H], topk_idx [T,K], topk_weights [T,K])
 *     -> recv_tokens [L,S,H], counts [L], plan
 *     ... the caller's experts: recv_tokens -> expert_out [L,S,H]
 *   xd_ll_combine(plan, expert_out) -> out [T,H]
 *
 * Sizes, tensors and the rules of operations are as in ep.h; there is no backward. S = W *
 * max_tokens_per_rank slots per expert, so nothing can overflow. The rows of expert e lie in the
 * slots 0 .. counts[e] - 1, by source rank, then token; the slots behind them are left untouched. A
 * rank has L local experts, which may be none, then its tensors [L,...] have no elements.
 *
 * Tensors [T,H] hold rows as in ep.h. Tensors [L,S,H] may have any strides over L and S that are
 * multiples of 16 bytes and give each row a place of its own; a row is contiguous. They may lie
 * anywhere on the rank's device: symmetric memory makes no difference here.
 *
 * Receive forms. Tensors [L,S,..] are those of a group with XD_LL_SLOTS. A group may receive
 * without gaps instead, into tensors [N,H] (config.receive):
 *   XD_LL_BY_EXPERT  one row per (token, expert), in zones, as XD_EP_EXPERT_MAJOR in ep.h with the
 *                    config's alignment. Padding rows are zero, with scales and weight 0.
 *   XD_LL_BY_RANK    one row per (token, rank), as XD_EP_RANK_MAJOR: the caller sums a token's
 *                    experts here into one row of expert_out.
 * Rows, weights, local experts, counts and the sums of combine are, bit for bit, those of prepare,
 * dispatch and combine of that layout, but for the exception below. N is at least xd_ll_recv_bound,
 * so nothing can overflow; rows behind the last are left untouched. Tensors [N,H] may have any
 * stride over N that is a multiple of 16 bytes and gives each row a place of its own. Weights that
 * dispatch is given arrive in recv_weights, and no combine uses them.
 *
 * Halves. With phase = XD_LL_PHASE_SEND a call sends what this rank has, and with
 * XD_LL_PHASE_RECEIVE a later call takes what has come; XD_LL_PHASE_BOTH does both. A send half
 * reads the inputs, and when it has ended they are the caller's again. A receive half writes the
 * outputs. Each checks and uses only its own fields, and `plan`, `quantise` and `wire`; the same
 * struct may be given to both. Between the halves nothing of the operation runs on the device.
 * Dispatch and combine count apart, so two batches may be interleaved as S(A) S(B) R(A) R(B);
 * receive halves come in the order of their send halves. At most config.in_flight operations of a
 * kind may be between their halves: one more send half is XD_ERROR_BUSY, which takes no turn and
 * leaves all as it was (on CUDA it is told by xd_ll_group_status, like every error that a kernel
 * finds).
 * All ranks make the same calls of a kind, in the same order, halves of one rank being the same as
 * one call of another. A send half waits for a free place: until every rank has ended its receive
 * half of the operation config.in_flight before, of that kind. Of the two kinds, no two ranks may
 * each receive first what the other sends only afterwards: both would wait. A send half of combine
 * that is given weights receives as well in this sense: it needs those of its peers, and waits for
 * their send halves. Weights that are given to dispatch cost no such wait. Between machines a whole
 * call, and a receive half, also needs its peers to come to a call of this group: a rank must not
 * wait between its halves for a peer that makes the call whole, in a barrier or another group, say.
 *
 * A rank whose send half (or call) fails tells its peers, and their receive halves report
 * XD_ERROR_MISMATCH; there is then no receive half on this rank. A call whose phase is none, or
 * that has no args, counts as a whole one that fails. A receive half whose own arguments are bad
 * ends the operation here; its peers are whole, and do not hear of it. A receive half without a
 * send half is XD_ERROR_INVALID_ARGUMENT, and takes no turn. So is a call with XD_LL_PHASE_BOTH
 * while another operation of its kind is between its halves, which it would overtake.
 *
 * Between machines (on the CPU) the network moves while a rank is in a call of the
 * group. Bytes that it has not taken when a send half ends go on with the rank's next call; a whole
 * call, a receive half or a call that fails ends when all that peers need of it reaches them.
 *
 * Sums and rounding are those of ep.h: each rank sums the token's rows in float32 by ascending k,
 * and rounds once (combine: or as its wire says, see quantise.h);        then the ranks' sums are
 * added in float32 by ascending rank, and rounded once;
 * where ranks have named several hosts, on each host, and then the hosts' sums, likewise.
 * The one exception to "moved elements keep every bit": 8 bytes of ones, aligned to 8 bytes in a
 * row of bf16, fp16 or fp32 without scales, or in one that is quantised here, arrive on CUDA as
 * another NaN, and so does a pair of weights of ones.
 *
 * Lost ranks. In a group with on_peer_loss = XD_LL_PEER_LOSS_FATAL the loss of a rank finishes the
 * communicator, as everywhere. With XD_LL_PEER_LOSS_MASK the group goes on without the rank: see
 * "Masks" below.
 */
#ifndef CROSSDOCK_LOW_LATENCY_H_
#define CROSSDOCK_LOW_LATENCY_H_

#include <crossdock/ep.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xd_ll_group xd_ll_group;

/* The half of an operation that a call does. */
typedef enum xd_ll_phase {
  XD_LL_PHASE_BOTH = 0,
  XD_LL_PHASE_SEND = 1,
  XD_LL_PHASE_RECEIVE = 2
} xd_ll_phase;

/* The loss of a rank, which has died or is late, finishes the communicator, or the group goes on
 * without the rank: see "Masks" below. */
typedef enum xd_ll_peer_loss {
  XD_LL_PEER_LOSS_FATAL = 0,
  XD_LL_PEER_LOSS_MASK = 1
} xd_ll_peer_loss;

/* The form in which a group's dispatch delivers rows, and its combine takes them: see "Receive
 * forms" above. */
typedef enum xd_ll_receive {
  XD_LL_SLOTS = 0,
  XD_LL_BY_EXPERT = 1,
  XD_LL_BY_RANK = 2
} xd_ll_receive;

/* No xd_ep_operation has the number of one of these. */
typedef enum xd_ll_operation {
  XD_LL_DISPATCH = 5,
  XD_LL_COMBINE = 6,
  XD_LL_RESET = 7,
  /* xd_ll_group_set_placement in placement.h. */
  XD_LL_SET_PLACEMENT = 9
} xd_ll_operation;

/* Bounds of what follows, beside those of ep.h. */
#define XD_LL_MAX_TOKENS    1024 /* of max_tokens_per_rank */
#define XD_LL_MAX_RANKS     72
#define XD_LL_MAX_IN_FLIGHT 4
#define XD_LL_MAX_SCALES    16383 /* of the columns of dispatch's scales */

/* Sizes of one kind of low-latency traffic. Equal on all ranks, but for num_sms (of hidden and
 * dtype, the row's bytes are what must be equal). */
typedef struct xd_ll_config {
  size_t struct_size;
  /* W, for the pure functions below. xd_ll_group_create also takes 0 = the communicator's. At most
   * XD_LL_MAX_RANKS. */
  int32_t num_ranks;
  /* E, at most XD_EP_MAX_EXPERTS; without expert_ranks a multiple of num_ranks. */
  int32_t num_experts;
  /* Largest K, 1 to XD_EP_MAX_TOPK. */
  int32_t max_topk;
  /* Largest T, 1 to XD_LL_MAX_TOKENS. The slots of a rank's experts, L * S, are below 2^31. */
  int32_t max_tokens_per_rank;
  /* Largest H, in elements of `dtype`. A row of a call may have fewer bytes, never more. */
  int32_t hidden;
  /* Widest payload: {kDLBfloat, 16, 1} or {kDLFloat, 16 or 32, 1}. */
  DLDataType dtype;
  xd_ep_duplicate_ids duplicate_ids;
  xd_ep_on_error on_error;
  xd_ll_peer_loss on_peer_loss;
  /* The most operations of a kind between their halves: 2 to XD_LL_MAX_IN_FLIGHT; 0 = 2. */
  int32_t in_flight;
  /* Longest wait of an operation, or of one half of it (with MASK twice that for a peer to free a
   * place, as it may wait itself); 0 = the communicator's. */
  int32_t wait_timeout_ms;
  /* CUDA: multiprocessors to use; 0 = the library chooses. The CPU executor ignores it. */
  int32_t num_sms;
  /* For xd_ll_group_memory: kDLCPU (or 0) or kDLCUDA; otherwise also 0 = the communicator's. */
  int32_t device_type;
  /* [E] rank of each expert, or NULL: as in xd_ep_config. Read during the call only. */
  const int32_t* expert_ranks;
  xd_ll_receive receive;
  /* BY_EXPERT: zones begin at multiples of so many rows, a power of two up to 2^20; 0 = 1. In other
   * groups 0 or 1. */
  int32_t alignment;
  /* The wires that calls of combine may name, as in xd_ep_config. */
  uint32_t wire_formats;
  /* N logical experts, as in xd_ep_config; 0 = ids name the experts themselves. */
  int64_t num_logical_experts;
} xd_ll_config;
/* clang-format off */
#define XD_LL_CONFIG_INIT \
  {sizeof(xd_ll_config), 0, 0, 0, 0, 0, {kDLBfloat, 16, 1}, XD_EP_DUPLICATE_IDS_ERROR, \
   XD_EP_ON_ERROR_STATUS, XD_LL_PEER_LOSS_FATAL, 0, 0, 0, 0, NULL, XD_LL_SLOTS, 0, 0, 0}
/* clang-format on */

/* ---- Sizes ----------------------------------------------------------------------------------- */
/* These are pure functions of a config, as those of ep.h. */

/* L of a rank: the number of experts that it holds. */
XD_API xd_status xd_ll_local_experts(const xd_ll_config* config, int32_t rank,
                                     int32_t* num_local_experts);

/* Bytes of a plan: about W*T*(8*K + 16), with T and K at their bounds. */
XD_API xd_status xd_ll_plan_size(const xd_ll_config* config, size_t* bytes);

/* The most rows that a rank can receive of up to max_tokens tokens per rank (0 = the config's): N
 * is at least that. BY_EXPERT: W * max_tokens * min(max_topk, L) with worst-case padding and the
 * largest L of all ranks; BY_RANK: W * max_tokens. INVALID_ARGUMENT for SLOTS. */
XD_API xd_status xd_ll_recv_bound(const xd_ll_config* config, int32_t max_tokens, int64_t* rows);

typedef struct xd_ll_memory {
  size_t struct_size;
  /* Memory shared with the peers. */
  size_t symmetric_bytes;
  /* Working memory of this rank. */
  size_t private_bytes;
} xd_ll_memory;
#define XD_LL_MEMORY_INIT \
  { sizeof(xd_ll_memory), 0, 0 }

/* The memory that a group with this config will take on one rank, to within a page and a few
 * kilobytes of handles, and without links to other machines (docs/ep-semantics.md). */
XD_API xd_status xd_ll_group_memory(const xd_ll_config* config, xd_ll_memory* memory);

/* ---- Groups ---------------------------------------------------------------------------------- */

/* Makes a group, as xd_ep_group_create does, and with its errors. On a rank that has taken
 * another's place it takes over that rank's part of a group: see xd_comm_invite. A communicator may
 * have groups of both kinds. UNSUPPORTED between machines without libfabric, or on CUDA with masks
 * or wires. */
XD_API xd_status xd_ll_group_create(xd_comm* comm, const xd_ll_config* config, xd_ll_group** group);

/* Frees, as xd_ep_group_destroy does; between machines it waits at most 6 seconds for peers that
 * are in the last operation. NULL is allowed. */
XD_API xd_status xd_ll_group_destroy(xd_ll_group* group);

typedef struct xd_ll_status {
  size_t struct_size;
  /* Status of the error; XD_SUCCESS = there is none. */
  xd_status status;
  /* The operation that met the error. */
  xd_ll_operation operation;
  /* Number of that operation among those of its kind, from 1. CUDA, for mistakes that the call
   * itself found: the number of the call, not counting replays of graphs. */
  uint64_t epoch;
  /* The lowest rank that the error is about; -1 = none. */
  int32_t rank;
  /* Expert ids out of range or (DUPLICATE_IDS_ERROR) repeated in a row, over all ranks, in batches
   * dispatched since. */
  int64_t bad_ids;
  char text[256];
  /* The ranks that this rank has masked, and those that have masked this rank since they were last
   * in step. Bit r % 64 of word r / 64 stands for rank r. */
  uint64_t masked[2];
  uint64_t masked_by[2];
  /* Choices of this rank whose logical expert had no slot, in batches dispatched since, on CUDA
   * also in dispatches that came to nothing: they count as -1. */
  int64_t unplaced_choices;
} xd_ll_status;
/* clang-format off */
#define XD_LL_STATUS_INIT \
  {sizeof(xd_ll_status), XD_SUCCESS, XD_LL_DISPATCH, 0, -1, 0, {0}, {0, 0}, {0, 0}, 0}
/* clang-format on */

/* Reads and clears what the group remembers, as xd_ep_group_status does: the first non-fatal error
 * that no call has returned, and the bad ids. The masks are those of now. Never blocks. Any
 * thread. */
XD_API xd_status xd_ll_group_status(xd_ll_group* group, xd_ll_status* status);

/* The error of its own that the calling thread's last call into a group of this kind returned, as
 * xd_ep_last_error tells that of the other kind. */
XD_API xd_status xd_ll_last_error(xd_ll_status* status);

/* A word that counts the operations of this rank that have ended with an error of their own: as
 * xd_ep_group_watch, with xd_ll_group_status for xd_ep_group_status. */
XD_API xd_status xd_ll_group_watch(xd_ll_group* group, const volatile uint64_t** word);

/* ---- Operations ------------------------------------------------------------------------------ */

typedef struct xd_ll_dispatch_args {
  size_t struct_size;
  xd_ll_phase phase;
  /* In [T,H], send half: any type of xd_ep_dispatch_args, up to the group's row; bf16 to be
   * quantised. On CUDA other types than bf16, fp16 and fp32, and rows with `scales`, have a byte
   * more for 32; they are UNSUPPORTED where that has no room in the group's row. */
  const DLTensor* tokens;
  /* In [T,K] int32 or int64, send half: expert of each choice; -1 = none. K is equal on all ranks,
   * up to the group's max_topk. Bad and repeated ids are taken as by xd_ep_prepare. */
  const DLTensor* topk_idx;
  /* In [T,K] float32, optional, send half: the weights go into the plan, and a combine that has
   * none of its own uses them. Given on all ranks or on none. */
  const DLTensor* topk_weights;
  /* NONE, FP8_BLOCK128, FP8_BLOCK128_POW2 or FP8_BLOCK128_E8M0: quantised before the rows travel.
   * Equal on all ranks. */
  xd_ep_quantise quantise;
  /* BY_EXPERT and BY_RANK, 0 in other groups; both halves: the most tokens that a rank may have in
   * this call, up to max_tokens_per_rank, and equal on all ranks; 0 = max_tokens_per_rank. It
   * bounds T and N. */
  int32_t max_tokens;
  /* Out, receive half, plan_bytes >= xd_ll_plan_size: the routing of this batch, as plain bytes in
   * the caller's memory. As a plan of ep.h it may be copied and moved, begins at a multiple of 16
   * bytes, and serves any number of combines in the group, also while other plans are alive. */
  void* plan;
  size_t plan_bytes;
  /* Out [L,S,H], or [N,H] in other receive forms, receive half: type of tokens; float8_e4m3fn when
   * quantising. */
  const DLTensor* recv_tokens;
  /* Out, receive half, given iff quantising, or `scales` is given: [L,S,H/128] float32; with E8M0
   * float8_e8m0fnu or uint8, or [L,S,H/512] int32, which packs the bytes of 4 blocks, the first
   * lowest (H is a multiple of 512); with `scales` its columns and type; in other forms [N,..]
   * likewise. Any strides under which each element has a place of its own. */
  const DLTensor* recv_scales;
  /* Out [L] int32, receive half: rows per local expert, without padding (BY_RANK: pairs of token
   * and expert). */
  const DLTensor* counts;
  /* The outputs from here on are optional, of the receive half. */
  /* Out [L,W] int64, SLOTS only: for each source rank, its first slot << 32 | its rows. */
  const DLTensor* source_ranges;
  /* Out [L,S] int32, SLOTS only: the token's index at its source rank; untouched behind the
   * rows. */
  const DLTensor* source_tokens;
  /* In and out [L] int32 or int64: counts are added to it. */
  const DLTensor* expert_load;
  /* In and out [W] int64: to it is added, for each source rank, the time in nanoseconds from the
   * beginning of the receive half until the source's header had come; 0 for this rank. A rank that
   * is always late stands out. */
  const DLTensor* wait_ns;
  /* The fields from here on are for BY_EXPERT and BY_RANK, and NULL in other groups. */
  /* Out int64, receive half. BY_EXPERT [L+1]: first row of each zone, and the end of the last;
   * BY_RANK [W+1]: first row of each source rank, and the end of the last. */
  const DLTensor* row_offsets;
  /* Out float32, receive half, given iff topk_weights is given: BY_EXPERT [N]; BY_RANK [N,K], 0
   * where recv_topk_idx is -1, and past the last row. */
  const DLTensor* recv_weights;
  /* Out [N,K] int32 or int64, receive half, optional, BY_RANK only: local expert, or -1, and -1
   * past the last row. */
  const DLTensor* recv_topk_idx;
  /* In [T,S], optional, send half, NULL when quantising: scales of the rows, as in
   * xd_ep_dispatch_args: float32, float8_e8m0fnu, float8_e4m3fn or uint8, any strides, up to
   * XD_LL_MAX_SCALES columns; beside float4_e2m1fn_x2 one for 16 or for 32 numbers. A row and its
   * scales together have at most the bytes of the group's row. Given on all ranks or on none, with
   * one S and element size. They arrive in recv_scales, bit for bit. */
  const DLTensor* scales;
  /* In [T] int32 or int64, send half, optional, with logical experts only: as in
   * xd_ep_prepare_args. */
  const DLTensor* replica_hint;
} xd_ll_dispatch_args;
/* clang-format off */
#define XD_LL_DISPATCH_ARGS_INIT \
  {sizeof(xd_ll_dispatch_args), XD_LL_PHASE_BOTH, NULL, NULL, NULL, XD_EP_QUANTISE_NONE, \
   0, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}
/* clang-format on */

/* Copies each token's row to a slot of every expert that it has chosen, or as the group's receive
 * form says. Bad expert ids anywhere:
 * outputs and plan are complete and usable, and on every rank the status is INVALID_ARGUMENT (CPU:
 * returned; CUDA: in xd_ll_group_status) with the lowest rank and the number of bad ids. */
XD_API xd_status xd_ll_dispatch(xd_ll_group* group, const xd_ll_dispatch_args* args,
                                xd_stream stream);

typedef struct xd_ll_combine_args {
  size_t struct_size;
  xd_ll_phase phase;
  /* In, both halves: the plan of the batch. */
  const void* plan;
  size_t plan_bytes;
  /* In [L,S,H], send half: bf16, fp16 or fp32, up to the group's row. Slots behind the rows are not
   * read. In other receive forms [N,H], where N is at least the plan's recv_rows; padding is not
   * read. */
  const DLTensor* expert_out;
  /* In [T,K] float32, optional, send half: wins over the weights that dispatch was given. Given on
   * all ranks or on none. Without weights of either kind a row counts once. INVALID_ARGUMENT
   * BY_RANK, where a row stands for several experts. */
  const DLTensor* topk_weights;
  /* Out [T,H], receive half, type of expert_out: sum over the token's rows; zero for a token
   * without rows. */
  const DLTensor* out;
  /* In and out [W] int64, optional, receive half: as in dispatch. */
  const DLTensor* wait_ns;
  /* Both halves: as in xd_ep_combine_args, with the same bits. */
  xd_ep_wire wire;
} xd_ll_combine_args;
/* clang-format off */
#define XD_LL_COMBINE_ARGS_INIT \
  {sizeof(xd_ll_combine_args), XD_LL_PHASE_BOTH, NULL, 0, NULL, NULL, NULL, NULL, XD_EP_WIRE_SAME}
/* clang-format on */

/* Brings the experts' results back and sums them per token. A plan may be combined several
 * times. */
XD_API xd_status xd_ll_combine(xd_ll_group* group, const xd_ll_combine_args* args,
                               xd_stream stream);

/* Takes this rank's turn in XD_LL_DISPATCH, XD_LL_COMBINE or XD_LL_SET_PLACEMENT with a failure, as
 * xd_ep_join_failed does. It stands for both halves of the operation. */
XD_API xd_status xd_ll_join_failed(xd_ll_group* group, xd_ll_operation operation, const char* text,
                                   xd_stream stream);

/* ---- Plans ----------------------------------------------------------------------------------- */

typedef struct xd_ll_plan_info {
  size_t struct_size;
  int32_t rank;
  int32_t num_ranks;
  int32_t num_experts;
  /* T. */
  int32_t num_tokens;
  /* K. */
  int32_t topk;
  /* Rows that this rank has received: SLOTS the sum of all counts; else the end of the last zone or
   * source rank, padding included. */
  int64_t recv_rows;
  /* Bad ids over all ranks, and the lowest rank that has some; -1 = none. */
  int64_t bad_ids;
  int32_t bad_id_rank;
  /* Equal on all ranks for one batch, different for any other batch of the group. */
  uint64_t fingerprint;
  /* Number of the dispatch in its group. */
  uint64_t epoch;
} xd_ll_plan_info;
#define XD_LL_PLAN_INFO_INIT \
  { sizeof(xd_ll_plan_info), 0, 0, 0, 0, 0, 0, 0, -1, 0, 0 }

/* Reads a plan that lies in host memory. INVALID_ARGUMENT if the bytes are no plan of dispatch and
 * of this library version, cut short, or damaged in the header. Never blocks. Any thread. */
XD_API xd_status xd_ll_plan_get_info(const void* plan, size_t plan_bytes, xd_ll_plan_info* info);

/* ---- Masks ----------------------------------------------------------------------------------- */
/* A rank that is masked is neither sent to nor waited for. In a group with on_peer_loss =
 * XD_LL_PEER_LOSS_MASK a rank masks another
 *   - whose process has ended (the communicator must have been made to outlive that: see
 *     xd_comm_config.on_peer_loss),
 *   - for which a wait has come to its timeout (config.wait_timeout_ms),
 *   - that says that it has masked this rank, so that none of the two waits for the other,
 *   - by xd_ll_mask_set.
 * A rank's mask is its own and is not spread: what to do where masks differ is the serving
 * framework's policy, for which xd_ll_status tells both whom this rank has masked and which ranks
 * have masked it. All survivors wait for a dead or stuck rank in the same operation, so each masks
 * it by itself.
 *
 * The operation that meets a loss ends with XD_ERROR_PEER_LOST (CPU: returned; CUDA: in
 * xd_ll_group_status), which is not fatal, with the lowest such rank. Its outputs are complete but
 * for that rank's share: a source whose header has not come counts 0 rows; where the header came
 * but rows did not, the missing rows are zero, with their scales and the weights beside them, and
 * counted; combine sums over the other ranks without any new weighting, and gives zero for a token
 * that has no row left. Operations whose send half comes later do without the rank, at full speed,
 * and report nothing; those that were between their halves report the loss once each.
 *
 * A masked rank that still runs can come back, and so can a process that has taken the place of a
 * masked one (xd_comm_invite): each side unmasks the other by xd_ll_mask_set, then all ranks that
 * are not masked call xd_ll_reset. CUDA: when both sides have unmasked. Bytes that it sends before
 * that are never read. */

/* This and the next two calls are for groups with on_peer_loss = XD_LL_PEER_LOSS_MASK; in others
 * they are XD_ERROR_INVALID_ARGUMENT.
 *
 * Masks (1) or unmasks (0) a rank, in this rank's view, from the next operation on. Local; any
 * thread. CPU: also while an operation runs in another thread, which then waits no more for a rank
 * that is masked. CUDA: in the order of the stream, that of the operations. The own rank is
 * INVALID_ARGUMENT. An operation that is between its halves waits no more for a rank that is
 * masked meanwhile: its share counts if it has come, and otherwise the operation ends with
 * XD_ERROR_PEER_LOST. An operation that was sent without a rank ends without it, also if that is
 * unmasked meanwhile. */
XD_API xd_status xd_ll_mask_set(xd_ll_group* group, int32_t rank, int32_t masked, xd_stream stream);

/* Tells whom this rank has masked. mask: out [W] int32, 1 = masked. Local; on CUDA in the order of
 * the stream, and may be captured. In groups as of xd_ll_mask_set. */
XD_API xd_status xd_ll_mask_get(xd_ll_group* group, const DLTensor* mask, xd_stream stream);

/* Brings the ranks that are not masked back into step: waits until all have called it, forgets
 * operations that are between their halves, clears what has been sent and not been taken, and
 * counts on from the highest number. Collective over those ranks. Plans stay good. Needed after an
 * unmasking, and allowed at any time. In groups as of xd_ll_mask_set. */
XD_API xd_status xd_ll_reset(xd_ll_group* group, xd_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_LOW_LATENCY_H_ */
