/* Crossdock: the gated activation between the two products of experts, and its derivative.
 *
 * Both are local calls: they concern this rank alone, take no turn among a group's operations, and
 * work after a fatal error. On CUDA they are enqueued on `stream`, and may be captured.
 */
#ifndef CROSSDOCK_GATED_H_
#define CROSSDOCK_GATED_H_

#include <crossdock/comm.h>
#include <crossdock/quantise.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The function a(g) of a gated activation; s(z) = 1 / (1 + exp(-z)). */
typedef enum xd_gated_activation {
  XD_GATED_SILU = 0, /* g s(g): SwiGLU (arXiv:2002.05202) */
  /* g s(z), z = g (1.5957691216 + 0.0713548163 g^2): GELU by its approximation with tanh */
  XD_GATED_GELU_TANH = 1,
  XD_GATED_RELU = 2,        /* max(g, 0) */
  XD_GATED_RELU_SQUARED = 3 /* max(g, 0)^2 */
} xd_gated_activation;

/* Tensors of these two calls, but offsets, may have any strides. Packed elements in rows that begin
 * at multiples of 16 bytes are the fast case on CUDA, and the only one where the result is fp8;
 * halves of one tensor's columns are such rows. */
typedef struct xd_gated_args {
  size_t struct_size;
  xd_gated_activation activation;
  /* In [R,F]: bf16, fp16 or fp32, and of the same type [R,F]. They are only read. */
  const DLTensor* gate;
  const DLTensor* up;
  /* In [R], optional: float32, a factor of each row. */
  const DLTensor* weights;
  /* In [L+1], optional: int32 or int64, as prepare gives them. Rows from the last one on are
   * neither read nor written. NULL: there are none. */
  const DLTensor* offsets;
  /* Out [R,F], type of gate, or float8_e4m3fn by `quantise`: a(gate) up, times the row's weight. */
  const DLTensor* out;
  /* Experts first_expert .. first_expert + num_experts - 1 alone; num_experts 0 = to the last one.
   * Expert 0 begins at row 0. Rows of others are left alone. Without offsets both are 0. */
  int32_t first_expert;
  int32_t num_experts;
  /* Out [R,F/128] float32, with fp8 alone: the scales of out's blocks of 128 columns, as
   * xd_grouped_product takes them. Elements of a row are packed. */
  const DLTensor* out_scales;
  /* The way in which out becomes fp8: FP8_BLOCK128 or FP8_BLOCK128_POW2, with F a multiple of 128.
   * As there, but x is a float32, and an infinity becomes a NaN, so that no limited number hides
   * an overflow. A NaN's code is 0x7f. */
  xd_ep_quantise quantise;
} xd_gated_args;
/* clang-format off */
#define XD_GATED_ARGS_INIT \
  {sizeof(xd_gated_args), XD_GATED_SILU, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, \
   XD_EP_QUANTISE_NONE}
/* clang-format on */

/* Computes the gated activation between an expert's two products, up to the end of the last zone.
 *
 * All is float32, and each operation is rounded: a(g); times up; times the weight; then once to the
 * type, or to fp8. Of z, which has been rounded, s(z) is within 2^-21, relatively, and 0 below -87.
 * All executors give equal bits. A NaN in a result is the quiet one without sign and payload. `out`
 * may be gate or up itself, if it has their type, and shares no other memory with an input.
 *
 * Errors: INVALID_ARGUMENT for a tensor of another shape, type or device, for experts that are not
 * there, and on CUDA for fp8 where rows are not the fast case. */
XD_API xd_status xd_gated(xd_comm* comm, const xd_gated_args* args, xd_stream stream);

typedef struct xd_gated_bwd_args {
  size_t struct_size;
  xd_gated_activation activation;
  /* In [R,F]: the gradient of out, and the same gate, up, weights and offsets. */
  const DLTensor* grad_out;
  const DLTensor* gate;
  const DLTensor* up;
  const DLTensor* weights;
  const DLTensor* offsets;
  /* Out [R,F], type of gate. They may be halves of one tensor's columns. */
  const DLTensor* grad_gate;
  const DLTensor* grad_up;
  /* Out [R], float32, given iff weights are. Its rows from the last zone's end on are left. */
  const DLTensor* grad_weights;
  /* As in xd_gated_args. */
  int32_t first_expert;
  int32_t num_experts;
} xd_gated_bwd_args;
/* clang-format off */
#define XD_GATED_BWD_ARGS_INIT \
  {sizeof(xd_gated_bwd_args), XD_GATED_SILU, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0}
/* clang-format on */

/* The derivative of xd_gated, likewise. With d = grad_out times the row's weight: grad_up is
 * d a(gate), grad_gate is (d up) a'(gate), and the weight's gradient the sum over the row of
 * grad_out times (a(gate) up), whose terms each executor adds in a fixed order of its own; on CUDA
 * it is another one where rows are not the fast case. grad_gate and grad_up may be gate, up or
 * grad_out themselves. */
XD_API xd_status xd_gated_bwd(xd_comm* comm, const xd_gated_bwd_args* args, xd_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_GATED_H_ */
