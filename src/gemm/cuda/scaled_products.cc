// A product of an operation, with its scales where cuBLASLt takes them.
#include "base/error.h"
#include "gemm/cuda/block_scales.h"
#include "gemm/cuda/call_shape.h"
#include "gemm/cuda/copies.h"
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/operations.h"

namespace xd::gemm::cuda {

void Operation::describe_one(const xd::cuda::ProductShape& shape) const {
  if (!shape.has_block_scales()) return w_.products->describe(shape);
  const std::uint64_t bytes = BlockScaleMap::make(shape.m, shape.n, shape.k).end;
  if (bytes > w_.block_scale_bytes) {
    fail(XD_ERROR_UNSUPPORTED, "a_scale or b_scale: one scale per 128 columns of K = ", shape.k,
         " takes ", bytes, " bytes of working memory for ", shape.m, " rows and N = ", shape.n,
         ", this context has ", w_.block_scale_bytes, ": make it with a larger max_k");
  }
  w_.products->describe(whole_of(shape));
  w_.products->describe(rest_of(shape));
}

// Scales of a part of the rows, or inside another tensor, need not begin where cuBLASLt takes them.
// Their copies are free again behind the product: all products of a context follow one another.
void Operation::run(const xd::cuda::ProductShape& shape, xd::cuda::ProductPointers pointers,
                    float beta) const {
  if (shape.has_block_scales()) return run_with_block_scales(shape, pointers);
  const auto align = [&](const float*& scales, int mode, std::int64_t rows, float* room) {
    if (is_aligned(scales)) return;
    const std::int64_t count = mode == xd::cuda::lt::kScaleScalar ? 1 : rows;
    copy(room, scales, at(count) * sizeof(float), s_);
    scales = room;
  };
  align(pointers.a_scale, shape.a_scale_mode, shape.m, w_.a_scales);
  align(pointers.b_scale, shape.b_scale_mode, shape.n, w_.b_scales);
  w_.products->run(shape, pointers, call_.alpha, beta, s_);
}

// D is all the product's: what is added to it comes from our kernels. The scales laid out anew, and
// the rest, are likewise free again behind the product.
void Operation::run_with_block_scales(const xd::cuda::ProductShape& shape,
                                      xd::cuda::ProductPointers pointers) const {
  if (shape.m == 0) return;
  const BlockScaleMap map = BlockScaleMap::make(shape.m, shape.n, shape.k);
  const auto floats = [&](std::uint64_t offset) {
    return reinterpret_cast<float*>(w_.block_scales + offset);
  };
  const bool b_fits =
      pointers.b_scale != nullptr && is_aligned(pointers.b_scale) && map.b_pitch == map.blocks;
  launch_block_scales({.a = pointers.a_scale,
                       .whole = floats(map.whole_scales),
                       .rest = floats(map.rest_scales),
                       .b = pointers.b_scale,
                       .b_to = b_fits ? nullptr : floats(map.b_scales),
                       .rows = shape.m,
                       .blocks = map.blocks,
                       .whole_rows = map.whole_rows,
                       .rest_pitch = xd::cuda::ProductShape::kBlockScaledRows,
                       .b_rows = map.b_rows,
                       .b_pitch = map.b_pitch},
                      multiprocessors(), s_);
  if (!b_fits) pointers.b_scale = floats(map.b_scales);
  xd::cuda::ProductPointers rest = pointers;
  pointers.a_scale = floats(map.whole_scales);
  w_.products->run(whole_of(shape), pointers, call_.alpha, 0.0f, s_);
  if (map.rest_rows == 0) return;
  const auto k = static_cast<std::uint64_t>(shape.k);  // bytes of a row
  const std::byte* const rest_a = static_cast<const std::byte*>(pointers.a);
  copy(w_.block_scales + map.rest_a, rest_a + bytes_of(map.whole_rows, k),
       bytes_of(map.rest_rows, k), s_);
  rest.a = w_.block_scales + map.rest_a;
  rest.d = w_.block_scales + map.rest_d;
  rest.a_scale = floats(map.rest_scales);
  w_.products->run(rest_of(shape), rest, call_.alpha, 0.0f, s_);
  // One by one: a row lies within one rank's memory, and several need not.
  const std::uint64_t element = shape.d_type == CUDA_R_32F ? 4 : 2;
  const std::uint64_t row = static_cast<std::uint64_t>(shape.n) * element;
  const std::uint64_t pitch = static_cast<std::uint64_t>(shape.d_pitch) * element;
  for (std::int64_t r = 0; r < map.rest_rows; ++r) {
    copy(static_cast<std::byte*>(pointers.d) + bytes_of(map.whole_rows + r, pitch),
         w_.block_scales + map.rest_d + bytes_of(r, row), row, s_);
  }
}

}  // namespace xd::gemm::cuda
