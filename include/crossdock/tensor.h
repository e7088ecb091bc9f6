/* Crossdock: DLTensors in one line, and names for element types.
 *
 *   xd_tensor tokens = xd_tensor_2d(data, XD_DTYPE_BFLOAT16, device, rows, columns);
 *   args.tokens = xd_tensor_view(&tokens);
 *
 * Nothing here is part of the library: structs are the caller's, and may be copied.
 */
#ifndef CROSSDOCK_TENSOR_H_
#define CROSSDOCK_TENSOR_H_

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define XD_DTYPE_OF_LANES(code, bits, lanes) \
  DLDataType { (code), (bits), (lanes) }
extern "C" {
#else
#define XD_DTYPE_OF_LANES(code, bits, lanes) ((DLDataType){(code), (bits), (lanes)})
#endif
#define XD_DTYPE(code, bits) XD_DTYPE_OF_LANES(code, bits, 1)

/* Element types by DLPack's codes, whether or not the DLPack header at hand has a name for them. */
#define XD_DTYPE_INT8           XD_DTYPE(0, 8)
#define XD_DTYPE_INT32          XD_DTYPE(0, 32)
#define XD_DTYPE_INT64          XD_DTYPE(0, 64)
#define XD_DTYPE_UINT8          XD_DTYPE(1, 8)
#define XD_DTYPE_FLOAT16        XD_DTYPE(2, 16)
#define XD_DTYPE_FLOAT32        XD_DTYPE(2, 32)
#define XD_DTYPE_BFLOAT16       XD_DTYPE(4, 16)
#define XD_DTYPE_BOOL           XD_DTYPE(6, 8)
#define XD_DTYPE_FLOAT8_E4M3FN  XD_DTYPE(10, 8)
#define XD_DTYPE_FLOAT8_E5M2    XD_DTYPE(12, 8)
#define XD_DTYPE_FLOAT8_E8M0FNU XD_DTYPE(14, 8)
/* Two numbers in a byte: an element of a tensor is such a byte. */
#define XD_DTYPE_FLOAT4_E2M1FN_X2 XD_DTYPE_OF_LANES(17, 4, 2)

/* A tensor with the storage of its shape and strides. */
typedef struct xd_tensor {
  /* Complete after xd_tensor_view. */
  DLTensor dl;
  int64_t shape[2];
  /* In elements. */
  int64_t strides[2];
} xd_tensor;

/* A matrix of any strides. */
static inline xd_tensor xd_tensor_2d_strided(void* data, DLDataType dtype, DLDevice device,
                                             int64_t rows, int64_t columns, int64_t row_stride,
                                             int64_t column_stride) {
  xd_tensor tensor;
  tensor.dl.data = data;
  tensor.dl.device = device;
  tensor.dl.ndim = 2;
  tensor.dl.dtype = dtype;
  tensor.dl.shape = NULL;   /* NOLINT(modernize-use-nullptr): this is C, too */
  tensor.dl.strides = NULL; /* NOLINT(modernize-use-nullptr) */
  tensor.dl.byte_offset = 0;
  tensor.shape[0] = rows;
  tensor.shape[1] = columns;
  tensor.strides[0] = row_stride;
  tensor.strides[1] = column_stride;
  return tensor;
}

static inline xd_tensor xd_tensor_2d(void* data, DLDataType dtype, DLDevice device, int64_t rows,
                                     int64_t columns) {
  return xd_tensor_2d_strided(data, dtype, device, rows, columns, columns, 1);
}

static inline xd_tensor xd_tensor_1d(void* data, DLDataType dtype, DLDevice device, int64_t size) {
  xd_tensor tensor = xd_tensor_2d_strided(data, dtype, device, size, 1, 1, 1);
  tensor.dl.ndim = 1;
  return tensor;
}

/* The tensor as calls take it. The view is good while `tensor` lives where it is and is not copied
 * over. */
static inline const DLTensor* xd_tensor_view(xd_tensor* tensor) {
  tensor->dl.shape = tensor->shape;
  tensor->dl.strides = tensor->strides;
  return &tensor->dl;
}

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_TENSOR_H_ */
