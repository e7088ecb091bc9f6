/* Crossdock: forms in which rows of expert parallelism travel, by the operations of ep.h and
 * low_latency.h. */
#ifndef CROSSDOCK_QUANTISE_H_
#define CROSSDOCK_QUANTISE_H_

#ifdef __cplusplus
extern "C" {
#endif

/* How dispatch makes float8_e4m3fn rows with scales out of bf16 rows on the way. A row is cut into
 * blocks of B columns (H is a multiple of B), and each has a scale: S = H / B.
 *
 *                       B    recv_scales              scale of a block
 *   FP8_BLOCK128        128  float32                  amax / 448, at least 2^-126; 1 if amax = 0
 *   FP8_BLOCK128_POW2   128  float32                  2^e, e >= -126; 1 if amax = 0
 *   FP8_BLOCK128_E8M0   128  float8_e8m0fnu or uint8  2^e, e >= -127, as the byte e + 127
 *   MXFP8               32   float8_e8m0fnu or uint8  2^e, e >= -127, as the byte e + 127
 *
 * amax is the largest |x| of the block over finite x, 0 if there is none. e is the smallest integer
 * not below its bound with 448 * 2^e >= amax: with e8m0 scales it is the bound, byte 0, where
 * amax = 0, and no finite x is cut off. TransformerEngine casts to MXFP8 in this way, by
 * ceil(log2(amax / 448)); the example of the OCP MX specification v1.0 (6.3) takes
 * floor(log2(amax)) - 8, under which numbers between 448 and 512 times the scale saturate.
 *
 * Element: x times the scale's reciprocal, rounded to the nearest e4m3, ties to even, subnormals
 * included, and limited to +-448. The quotient amax / 448, the reciprocal and the product are
 * float32, each rounded to nearest; where the scale is a power of two, only the last rounding, to
 * e4m3, changes anything. An element that becomes zero keeps its sign, an infinity becomes +-448
 * (0x7e, 0xfe), and a NaN 0x7f with its sign. All devices give equal bits. */
typedef enum xd_ep_quantise {
  /* Rows arrive as they are. */
  XD_EP_QUANTISE_NONE = 0,
  XD_EP_QUANTISE_FP8_BLOCK128 = 1,
  XD_EP_QUANTISE_FP8_BLOCK128_POW2 = 2,
  XD_EP_QUANTISE_FP8_BLOCK128_E8M0 = 3,
  XD_EP_QUANTISE_MXFP8 = 4
} xd_ep_quantise;
/* Columns that share a scale. */
#define XD_EP_QUANTISE_BLOCK(way) ((way) == XD_EP_QUANTISE_MXFP8 ? 32u : 128u)

/* The form in which combine brings a rank's partial sum of a token to the token's source.
 *
 *                       crosses as                                rounded
 *   SAME                the payload type                          to that type
 *   FLOAT32             float32                                   not at all
 *   FP8_BLOCK128 ...    float8_e4m3fn, a scale per 128 columns    as by xd_ep_quantise of that name
 *
 * Inputs and outputs have the payload type (bf16, fp16 or fp32) under every wire. Each rank adds up
 * the token's rows in float32 by ascending k; this sum p is put into the wire's form once, from
 * float32, with two differences from xd_ep_quantise: its x is a float32, and an infinity is sent as
 * a NaN, so that no limited number hides an overflow. H is a multiple of 128 then. The source adds
 * the ranks' sums, code times scale rounded to float32, in float32 by ascending rank, and rounds
 * once to the payload type. Its own rank's sum goes the same way, so bits do not depend on the rank
 * that a token comes from. Where ranks have named several hosts, the sum of each host is rounded to
 * the payload type before it is added, but with FLOAT32. Every NaN in the result of a wire other
 * than SAME is the quiet one without sign and payload; a token without rows gets +0.
 *
 * e4m3 has 3 bits behind the point: per rank an element's error is at most max(|p| / 16, scale /
 * 1024) + |p| / 2^22, but with powers of two |p| >= 0.96875 * 2^128 arrives as an infinity. */
typedef enum xd_ep_wire {
  XD_EP_WIRE_SAME = 0,
  XD_EP_WIRE_FLOAT32 = 1,
  XD_EP_WIRE_FP8_BLOCK128 = 2,
  XD_EP_WIRE_FP8_BLOCK128_POW2 = 3,
  XD_EP_WIRE_FP8_BLOCK128_E8M0 = 4
} xd_ep_wire;
/* The bit of a wire in config.wire_formats. */
#define XD_EP_WIRE_BIT(wire) (1u << (wire))

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_QUANTISE_H_ */
