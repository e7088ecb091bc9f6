#include "gemm/cuda/call_shape.h"

#include <algorithm>

#include "base/error.h"

namespace xd::gemm::cuda {
namespace {

using xd::cuda::ProductPointers;
using xd::cuda::ProductShape;
namespace lt = xd::cuda::lt;

bool is_fp8(DType type) { return dtype_bytes(type) == 1; }

void require_scaling(const ProductCall& call) {
  if (call.scaling == Scaling::none) return;
  if (call.operation == XD_GEMM_ALL_GATHER) {
    fail(XD_ERROR_UNSUPPORTED,
         "a_scale or b_scale: this version has scales in all_gather on the CPU only");
  }
  if (call.scaling == Scaling::blocks) {
    fail(XD_ERROR_UNSUPPORTED,
         "a_scale or b_scale: has one scale per 128 columns of K, expected "
         "one per tensor or per row on CUDA devices");
  }
  if (call.scaling == Scaling::rows && !(call.a_scale && call.b_scale)) {
    fail(XD_ERROR_UNSUPPORTED, call.a_scale ? "b_scale" : "a_scale",
         " = NULL, expected scales per row of both operands on CUDA devices");
  }
}

}  // namespace

cudaDataType_t lt_type(DType type) {
  switch (type) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::f16:
      return CUDA_R_16F;
    case DType::e4m3:
      return CUDA_R_8F_E4M3;
    case DType::e5m2:
      return CUDA_R_8F_E5M2;
    default:
      return CUDA_R_16BF;
  }
}

void require_supported(const ProductCall& call) {
  if (is_fp8(call.a.type) && (call.transpose_a || !call.transpose_b)) {
    fail(XD_ERROR_UNSUPPORTED, "transpose_a = ", int{call.transpose_a},
         " and transpose_b = ", int{call.transpose_b},
         ", expected 0 and 1 for fp8 on CUDA devices: give the transposed tensor");
  }
  if (call.transpose_a && call.operation == XD_GEMM_ALL_GATHER) {
    fail(XD_ERROR_UNSUPPORTED,
         "transpose_a = 1, expected 0: this version gathers rows of tokens only on CUDA devices");
  }
  if (call.reduce_bias_grad) {
    fail(
        XD_ERROR_UNSUPPORTED,
        "reduce_bias_grad = 1, expected 0: this version sums bias_grad over ranks on the CPU only");
  }
  if (call.bias_grad && call.operation == XD_GEMM_ALL_REDUCE) {
    fail(XD_ERROR_UNSUPPORTED,
         "bias_grad: given, expected NULL: this version has it in all_reduce on the CPU only");
  }
  if (call.bias_grad && call.c && call.c.data == call.d.data) {
    fail(XD_ERROR_UNSUPPORTED,
         "bias_grad: given with c = d, expected another c on CUDA devices, as it is read again");
  }
  require_scaling(call);
}

Problem problem_of(const ProductCall& call, const Config& config) {
  Problem p{.operation = call.operation, .ranks = config.ranks, .n = call.n, .k = call.k};
  if (call.operation == XD_GEMM_ALL_REDUCE) {
    p.tokens = call.a_rows;
    p.most_tokens = (call.a_rows + p.ranks - 1) / p.ranks;
    p.equal_shares = call.a_rows % p.ranks == 0;
  } else {
    p.tokens = call.shares.all();
    for (int r = 0; r < p.ranks; ++r) {
      p.most_tokens = std::max(p.most_tokens, call.shares.rows(r));
    }
    p.equal_shares = p.most_tokens * p.ranks == p.tokens;
  }
  p.input_bytes = static_cast<int>(dtype_bytes(call.a.type));
  p.partial_bytes = static_cast<int>(dtype_bytes(call.wide_type()));
  p.rows_of_tokens = !call.transpose_a;
  // By data sheet: not measured.
  p.speed = is_fp8(call.a.type)         ? 1.7
            : call.a.type != DType::f32 ? 1
            : call.allow_tf32           ? 0.5
                                        : 0.06;
  return p;
}

Room room_of(const ProductCall& call, const ContextMap& map) {
  Room room{.slot_bytes = map.slot_bytes,
            .slot_unit = 0,
            .word_bytes = map.word_bytes,
            .chunk_bytes = map.slot_bytes};
  if (call.operation != XD_GEMM_ALL_REDUCE) {
    // Words are gone when they have been read, and these sums need them twice.
    if (call.bias_grad) room.word_bytes = 0;
    return room;
  }
  // All ranks finish all rows only where all get all products. Otherwise sums travel as they are
  // stored.
  room.chunk_bytes = 0;
  const bool needs_sums = call.pre_activation && !call.has_activation_input();
  const bool in_one_step = needs_sums || call.d_amax || is_fp8(call.d.type);
  room.two_steps = !in_one_step;
  return room;
}

bool is_plain(const ProductCall& call) {
  const bool activated =
      call.epilogue == XD_GEMM_EPILOGUE_GELU || call.epilogue == XD_GEMM_EPILOGUE_RELU;
  return !call.pre_activation && !call.d_amax && !call.bias_grad && !is_fp8(call.d.type) &&
         !call.has_activation_input() && !(activated && call.d.type == DType::f32) &&
         (!call.bias || call.bias.type == call.d.type);
}

ProductShape product_shape(const ProductCall& call, std::int64_t rows, DType d_type,
                           bool finished) {
  ProductShape shape{.m = rows,
                     .n = call.n,
                     .k = call.k,
                     .a_type = lt_type(call.a.type),
                     .b_type = lt_type(call.b.type),
                     .d_type = lt_type(d_type),
                     .bias_type = lt_type(d_type),
                     .transpose_a = call.transpose_a,
                     .transpose_b = call.transpose_b,
                     .a_pitch = call.transpose_a ? call.a_rows : call.k,
                     .b_pitch = call.transpose_b ? call.k : call.n,
                     .d_pitch = call.n,
                     .fast_accumulate = call.fast_accumulate && is_fp8(call.a.type)};
  if (call.a.type == DType::f32 && call.allow_tf32) shape.compute = lt::kComputeTf32;
  if (call.scaling != Scaling::none) {
    const int mode = call.scaling == Scaling::rows ? lt::kScaleOuterVector : lt::kScaleScalar;
    if (call.a_scale) shape.a_scale_mode = mode;
    if (call.b_scale) shape.b_scale_mode = mode;
  }
  if (!finished) return shape;
  int epilogue = 0;
  if (call.bias) epilogue |= lt::kEpilogueBias;
  if (call.epilogue == XD_GEMM_EPILOGUE_GELU) epilogue |= lt::kEpilogueGelu;
  if (call.epilogue == XD_GEMM_EPILOGUE_RELU) epilogue |= lt::kEpilogueRelu;
  if (epilogue != 0) shape.epilogue = epilogue;
  return shape;
}

const std::byte* rows_of_a(const ProductCall& call, const std::byte* a, std::int64_t row) {
  const std::int64_t elements = call.transpose_a ? row : row * call.k;
  return a + static_cast<std::uint64_t>(elements) * dtype_bytes(call.a.type);
}

ProductPointers product_pointers(const ProductCall& call, const std::byte* a, void* d) {
  return {.a = a,
          .b = call.b.data,
          .d = d,
          .bias = call.bias.data,
          .a_scale = call.a_scale.as<const float>(),
          .b_scale = call.b_scale.as<const float>()};
}

Epilogue epilogue_of(const ProductCall& call, float alpha) {
  return {.alpha = alpha,
          .beta = call.beta,
          .c = call.c.data,
          .bias = call.bias.data,
          .activation = call.epilogue,
          .pre_activation = call.pre_activation.data,
          .d = call.d.data,
          .d_scale = call.d_scale.as<const float>(),
          .d_amax = call.d_amax.as<float>(),
          .c_type = call.c.type,
          .bias_type = call.bias.type,
          .pre_type = call.pre_activation.type,
          .d_type = call.d.type};
}

Epilogue without_stores(const Epilogue& epilogue) {
  Epilogue silent = epilogue;
  silent.d_amax = nullptr;
  const bool reads = epilogue.activation == XD_GEMM_EPILOGUE_DGELU ||
                     epilogue.activation == XD_GEMM_EPILOGUE_DRELU;
  if (!reads) silent.pre_activation = nullptr;
  return silent;
}

}  // namespace xd::gemm::cuda
