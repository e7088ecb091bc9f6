/* Crossdock: products of experts' rows, with a matrix for each expert.
 *
 * A zone is the rows of one local expert, offsets[e] <= row < offsets[e + 1], as a dispatch with
 * XD_EP_EXPERT_MAJOR leaves them. The device reads the offsets, so no host waits for them. They do
 * not decrease; zones that end behind row R are cut off there.
 *
 * Both are local calls: they concern this rank alone, take no turn among a group's operations, and
 * work after a fatal error. On CUDA they are enqueued on `stream`, may be captured, and take no
 * working memory.
 *
 * Sums are float32, over K (or over a zone's rows) in order. They are rounded once, to d's type. A
 * call with the same arguments gives the same bits again, also with another range of experts.
 * The CPU multiplies by oneDNN where it is installed, which adds terms in an order of its
 * own: there a row's bits may depend on how many rows its zone has.
 *
 * On CUDA both calls need compute capability 9.0, a and b of another type than fp32, and R, K and N
 * of at most 2^31 - 512: UNSUPPORTED otherwise. There a, b and d, and the rows in them, begin at
 * multiples of 16 bytes.
 */
#ifndef CROSSDOCK_GROUPED_H_
#define CROSSDOCK_GROUPED_H_

#include <crossdock/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xd_grouped_product_args {
  size_t struct_size;
  /* In [R,K]: bf16, fp16, fp32 or fp8 (e4m3). Elements of a row are packed; rows may lie further
   * apart. */
  const DLTensor* a;
  /* In [L,K,N], type of a: a matrix for each expert. Its strides along N or along K are 1, so a
   * view of [L,N,K] is as good; along K if the type is fp8. */
  const DLTensor* b;
  /* In [L+1]: int32 or int64, as prepare gives them. */
  const DLTensor* offsets;
  /* In, float32, for fp8 and for no other type, in one of two forms:
   * a_scale [R] and b_scale [L,N]: of rows and columns. A sum is multiplied by the scale of its
   * row, then by that of its column, each time rounded to float32.
   * a_scale [R,ceil(K/128)] and b_scale [L,ceil(N/128),ceil(K/128)]: of 128 elements of a row, as
   * dispatch gives them with XD_EP_QUANTISE_FP8_BLOCK128 and its POW2 form, and of blocks of 128
   * by 128. Elements of a row of scales are packed; rows, and experts, may lie further apart. */
  const DLTensor* a_scale;
  const DLTensor* b_scale;
  /* Out [R,N], rows as those of a: type of a, or fp32; if a is fp8, bf16 or fp32. Rows outside of
   * the range's zones are left alone. It shares no memory with an input. */
  const DLTensor* d;
  /* The zones that are multiplied: those of experts first_expert ..
   * first_expert + num_experts - 1; num_experts 0 = to the last one. */
  int32_t first_expert;
  int32_t num_experts;
  /* 1: the product is added to d, which is fp32. */
  int32_t accumulate;
} xd_grouped_product_args;
#define XD_GROUPED_PRODUCT_ARGS_INIT \
  { sizeof(xd_grouped_product_args), NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, 0 }

/* Multiplies each row of a zone by its expert's matrix: d[r] = a[r] b[e].
 *
 * Products of fp8 are exact, and their sums float32: CUDA adds up 128 of them at a time as tensor
 * cores do, with some bits less, and these sums in float32. Scales of blocks multiply elements on
 * the CPU, and the sums of 128 on CUDA, by the product of both scales, in float32.
 *
 * Errors: INVALID_ARGUMENT for a tensor of another shape, type or device, and for experts that are
 * not there; UNSUPPORTED, as above. Nothing has been written then. */
XD_API xd_status xd_grouped_product(xd_comm* comm, const xd_grouped_product_args* args,
                                    xd_stream stream);

typedef struct xd_grouped_outer_args {
  size_t struct_size;
  /* In [R,K] and [R,N]: bf16, fp16 or fp32, the same for both. Elements of a row are packed; rows
   * may lie further apart. */
  const DLTensor* a;
  const DLTensor* b;
  /* In [L+1]: int32 or int64, as prepare gives them. */
  const DLTensor* offsets;
  /* Out [L,K,N]: type of a, or fp32. Elements of a row are packed. Matrices of other experts than
   * the range's are left alone. It shares no memory with an input. */
  const DLTensor* d;
  /* The experts whose matrices are computed, as in xd_grouped_product_args. */
  int32_t first_expert;
  int32_t num_experts;
  /* 1: the products are added to d, which is fp32. */
  int32_t accumulate;
} xd_grouped_outer_args;
#define XD_GROUPED_OUTER_ARGS_INIT \
  { sizeof(xd_grouped_outer_args), NULL, NULL, NULL, NULL, 0, 0, 0 }

/* Multiplies the rows of each zone by one another, as gradients of the experts' matrices want it:
 * d[e] is the sum over the zone's rows r of the outer product of a[r] and b[r], and 0 for a zone
 * without rows. Errors: as of xd_grouped_product. */
XD_API xd_status xd_grouped_outer(xd_comm* comm, const xd_grouped_outer_args* args,
                                  xd_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_GROUPED_H_ */
