/* Crossdock: the routed experts of a mixture-of-experts layer as one call: dispatch, two grouped
 * products with a gated activation between them, combine; and the derivative of all that.
 *
 *   xd_ep_prepare(topk_idx, parts) -> plan, offsets
 *   xd_moe_forward(plan, tokens [T,H], topk_weights [T,K], w_in [L,H,2F], w_out [L,F,H])
 *     -> out [T,H], and what the backward pass needs
 *   xd_moe_backward(plan, grad_out, ...)
 *     -> grad_tokens, grad_topk_weights, grad_w_in, grad_w_out
 *
 * Letters are those of ep.h, F = columns inside an expert, R = rows of the receive tensors. An
 * expert is (a(x w_g) * (x w_u)) w_out, where w_g and w_u are the halves of w_in's columns.
 *
 * A call is made of these operations of its group and of local calls (ep.h, gated.h, grouped.h),
 * whose bits it has:
 *   forward   dispatch, xd_grouped_product, xd_gated, xd_grouped_product, combine
 *   backward  combine_bwd, xd_grouped_product, xd_gated_bwd, xd_grouped_product, dispatch_bwd,
 *             xd_grouped_outer for grad_w_out and for grad_w_in
 *
 * Schedules (`parts`, equal on all ranks):
 *   0       Serial: these calls one after another, on `stream`.
 *   P       The plan's parts. Operations are called in them, and the products of a part begin when
 *           its rows have arrived. On CUDA operations run on a stream of the library of the highest
 *           priority, products on two others; in the backward pass products for weights come last,
 *           beside dispatch_bwd. All wait for `stream` first, and `stream` for them last, so that
 *           callers see one stream, and graphs can capture the call; a stream of a green context
 *           gets all the work itself. On the CPU parts come one after another. The bits are the
 *           serial schedule's.
 * The CPU refuses any other number. On CUDA plans are not read before the stream comes to them:
 * there more than P is INVALID_ARGUMENT in the group's status; 2 to P-1 leave a combine under way,
 * which the group's next operation reports; and 1 is the schedule of a plan of one part.
 *
 * Tensors are those of ep.h; in [R,...] they are packed rows of a multiple of 16 bytes, at
 * multiples of 16 bytes, and all have one R. A receive tensor that peers write or read should lie
 * in symmetric memory, as without this layer: it is staged otherwise. All memory is the caller's;
 * xd_moe_sizes tells how much that is. EXPERT_MAJOR, bf16, fp16 and fp32 (on CUDA as grouped.h
 * says).
 *
 * Errors: both are collective, and take part with several operations of the group:
 * xd_ep_last_error and xd_ep_group_status tell of the one that failed. A bad argument of a rank is
 * INVALID_ARGUMENT there before anything starts, and MISMATCH on its peers, in their first
 * operation. If a rank fails between two operations (no memory, a kernel that cannot start) its
 * peers get MISMATCH in the next one; a failure in products for weights, which nothing follows, is
 * that rank's alone. The call ends with the first error, and outputs are undefined then. On CUDA
 * peers' calls return before they hear of it, so the rank fails in all of its operations that are
 * left: of each kind `parts`, or one if that is 0, out of bounds or cannot be read (args = NULL, a
 * bad struct_size). Where it then takes fewer turns than its peers, its caller owes them the rest
 * by xd_ep_join_failed. Waits are those of the operations.
 */
#ifndef CROSSDOCK_MOE_H_
#define CROSSDOCK_MOE_H_

#include <crossdock/ep.h>
#include <crossdock/gated.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xd_moe_forward_args {
  size_t struct_size;
  /* A plan of the group, and the offsets [L+1] that its prepare has written, int32 or int64. */
  const void* plan;
  size_t plan_bytes;
  const DLTensor* offsets;
  /* In [T,H]: bf16, fp16 or fp32, the type of all tensors without another one here. */
  const DLTensor* tokens;
  /* In [T,K], optional: float32, factors of the experts' results. */
  const DLTensor* topk_weights;
  /* In [L,H,2F] and [L,F,H]. Strides along the last or the last but one dimension are 1, as in
   * xd_grouped_product. NULL where L = 0. */
  const DLTensor* w_in;
  const DLTensor* w_out;
  /* Out [R,H], [R] float32 (given iff topk_weights are), [R,2F], [R,F] and [R,H]: rows on their
   * way through the experts. The backward pass reads them; callers without one may use them anew.
   */
  const DLTensor* recv_tokens;
  const DLTensor* recv_weights;
  const DLTensor* inner;
  const DLTensor* activated;
  const DLTensor* expert_out;
  /* Out [T,H]. */
  const DLTensor* out;
  /* a(g). */
  xd_gated_activation activation;
  /* The schedule: 0 or P, and nothing between. Equal on all ranks. */
  int32_t parts;
  /* CUDA, with parts: multiprocessors of operations that run beside products, which are all but the
   * first part of dispatch or combine_bwd, and the last one of combine, or of dispatch_bwd where no
   * gradient of weights is wanted. 0 = as the group, and so is any number beyond what the group may
   * use. */
  int32_t num_sms;
  /* 0. */
  int32_t reserved;
} xd_moe_forward_args;
/* clang-format off */
#define XD_MOE_FORWARD_ARGS_INIT \
  {sizeof(xd_moe_forward_args), NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
   NULL, NULL, XD_GATED_SILU, 0, 0, 0}
/* clang-format on */

/* Sends each token through its experts and sums the results. */
XD_API xd_status xd_moe_forward(xd_ep_group* group, const xd_moe_forward_args* args,
                                xd_stream stream);

typedef struct xd_moe_backward_args {
  size_t struct_size;
  const void* plan;
  size_t plan_bytes;
  const DLTensor* offsets;
  /* In [T,H]: the gradient of out. */
  const DLTensor* grad_out;
  /* In, as the forward pass had them. */
  const DLTensor* w_in;
  const DLTensor* w_out;
  /* In, as the forward pass has left them; recv_weights iff it was weighted, expert_out iff
   * grad_topk_weights is given. recv_tokens is optional without grad_w_in, and activated without
   * grad_w_out. */
  const DLTensor* recv_tokens;
  const DLTensor* recv_weights;
  const DLTensor* inner;
  const DLTensor* activated;
  const DLTensor* expert_out;
  /* Out [R,H], [R] float32 (given iff grad_topk_weights is), [R,F], [R,2F] and [R,H]: gradients on
   * their way, which nobody needs afterwards. grad_inner may be `inner` itself, which is then lost.
   */
  const DLTensor* grad_expert_out;
  const DLTensor* grad_recv_weights;
  const DLTensor* grad_activated;
  const DLTensor* grad_inner;
  const DLTensor* grad_recv_tokens;
  /* Out [T,H]. */
  const DLTensor* grad_tokens;
  /* Out [T,K], float32, optional, where the forward pass was weighted. */
  const DLTensor* grad_topk_weights;
  /* Out [L,H,2F] and [L,F,H], each optional: type of the weights, or fp32. Rows are packed. */
  const DLTensor* grad_w_in;
  const DLTensor* grad_w_out;
  /* As in xd_moe_forward_args; `activation` is the forward pass's, the schedule may be another. */
  xd_gated_activation activation;
  int32_t parts;
  int32_t num_sms;
  /* 1: gradients of weights are added to what is there, which is fp32. */
  int32_t accumulate;
} xd_moe_backward_args;
/* clang-format off */
#define XD_MOE_BACKWARD_ARGS_INIT \
  {sizeof(xd_moe_backward_args), NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
   NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, XD_GATED_SILU, 0, 0, 0}
/* clang-format on */

/* The derivative of xd_moe_forward. */
XD_API xd_status xd_moe_backward(xd_ep_group* group, const xd_moe_backward_args* args,
                                 xd_stream stream);

/* ---- Sizes and schedules: pure functions, for any thread ------------------------------------- */

typedef struct xd_moe_memory {
  size_t struct_size;
  /* R, the rows that fit whatever arrives: recv_capacity, or xd_ep_recv_bound. */
  int64_t rows;
  /* Of the tensors [R,...] that the forward pass writes, with weights: the backward pass needs
   * them. */
  size_t kept_bytes;
  /* Of the tensors [R,...] that the backward pass writes on its way. */
  size_t backward_bytes;
  /* Of one tensor [R,H]: its bytes in symmetric memory, if it is to lie there. */
  size_t row_tensor_bytes;
} xd_moe_memory;
#define XD_MOE_MEMORY_INIT \
  { sizeof(xd_moe_memory), 0, 0, 0, 0 }

/* Computes the memory of a layer whose experts have `ffn` columns (F, from 1), for the config's
 * hidden and dtype. INVALID_ARGUMENT for a bad config, another layout than EXPERT_MAJOR, a dtype
 * that has no sums, and an F whose rows are no multiples of 16 bytes. */
XD_API xd_status xd_moe_sizes(const xd_ep_config* config, int32_t ffn, xd_moe_memory* memory);

typedef struct xd_moe_overlap {
  size_t struct_size;
  /* For xd_ep_prepare, xd_moe_forward and xd_moe_backward: 0 = the serial schedule. */
  int32_t parts;
  /* For the latter two, which take fewer in a group that may use no more. */
  int32_t num_sms;
  /* Time of the forward pass by these parts, divided by that of the serial schedule, both on
   * devices that work without pauses; 1 for the serial one. */
  double predicted_ratio;
} xd_moe_overlap;
#define XD_MOE_OVERLAP_INIT \
  { sizeof(xd_moe_overlap), 0, 0, 1.0 }

/* Chooses a schedule by the sizes alone, so that all ranks choose alike: for batches of `tokens`
 * tokens on every rank (0 = max_tokens_per_rank) with max_topk choices each, spread evenly over the
 * experts, on H200 devices of one machine. Parts are taken only where a ratio of at most 0.97 is
 * predicted: docs/overlap.md has the formula. Configs for the CPU (device_type 0 or kDLCPU), of
 * float32, of one rank and of more than 8 get the serial schedule. Errors: as of xd_moe_sizes. */
XD_API xd_status xd_moe_schedule(const xd_ep_config* config, int32_t ffn, int32_t tokens,
                                 xd_moe_overlap* overlap);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_MOE_H_ */
