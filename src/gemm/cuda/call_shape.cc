#include "gemm/cuda/call_shape.h"

#include <algorithm>

#include "base/error.h"
#include "cuda/data_type.h"
#include "gemm/cuda/peer_mapped_cells.h"

namespace xd::gemm::cuda {
namespace {

using xd::cuda::data_type;
using xd::cuda::ProductPointers;
using xd::cuda::ProductShape;
namespace lt = xd::cuda::lt;

bool is_fp8(DType type) { return dtype_bytes(type) == 1; }

// cuBLASLt multiplies 16-bit numbers into numbers of the same type or into float32, float32 into
// float32, and fp8 into any.
bool multiplies_into(DType operands, DType d) {
  return is_fp8(operands) || d == operands || d == DType::f32;
}

// With scales of blocks it is relied on for no more than float32 and bfloat16.
bool multiplies_into(const ProductCall& call, DType d) {
  if (call.scaling == Scaling::blocks && d == DType::f16) return false;
  return multiplies_into(call.a.type, d);
}

}  // namespace

void require_supported(const ProductCall& call) {
  if (is_fp8(call.a.type) && (call.transpose_a || !call.transpose_b)) {
    fail(XD_ERROR_UNSUPPORTED, "transpose_a = ", int{call.transpose_a},
         " and transpose_b = ", int{call.transpose_b},
         ", expected 0 and 1 for fp8 on CUDA devices: give the transposed tensor");
  }
}

bool all_finish_all(const ProductCall& call) {
  return call.writes_pre_activation() || call.d_amax || call.bias_grad;
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
  p.rows_alone = !call.a_scale;
  p.stores_terms = stores_terms(call);
  // By data sheet: not measured.
  p.speed = is_fp8(call.a.type)         ? 1.7
            : call.a.type != DType::f32 ? 1
            : call.allow_tf32           ? 0.5
                                        : 0.06;
  return p;
}

Capacity capacity_of(const ProductCall& call, const ContextMap& map, std::uint64_t stitched_bytes) {
  Capacity capacity{
      .cell_bytes = stitched_bytes != 0 ? stitched_bytes : map.cell_bytes,
      .cell_unit = stitched_bytes,  // a rank's rows fill a cell, with a pitch that does that
      .word_bytes = map.word_bytes,
      .gather_word_bytes = std::min(map.word_bytes, ContextMap::kMostGatherWordBytes),
      .chunk_bytes = map.cell_bytes};
  if (call.operation != XD_GEMM_ALL_REDUCE) return capacity;
  if (!map.copies_all) capacity.chunk_bytes = 0;
  capacity.exact_sums = all_finish_all(call);
  capacity.two_steps = !capacity.exact_sums && !is_fp8(call.d.type);
  return capacity;
}

bool stores_terms(const ProductCall& call) { return multiplies_into(call, call.wide_type()); }

namespace {

// cuBLASLt adds no bias of float32 to a product of fp8, whatever D is.
bool adds_bias(const ProductCall& call) {
  const bool refused = is_fp8(call.a.type) && call.bias.type == DType::f32;
  return !refused && call.bias.type == call.d.type && is_aligned(call.bias.data);
}

}  // namespace

// cuBLASLt's GELU is not taken: it has errors of 5e-6, and D is to be rounded from float32's. Nor
// is its sum with C in 16 bits: some of its kernels round the product before they add C.
bool is_plain(const ProductCall& call) {
  const bool activated = call.epilogue == XD_GEMM_EPILOGUE_RELU;
  const bool adds = call.c || call.bias || activated;
  if (call.scaling == Scaling::blocks && adds) return false;
  return multiplies_into(call, call.d.type) && !call.pre_activation && !call.d_amax &&
         !call.bias_grad && !is_fp8(call.d.type) && !call.has_activation_input() &&
         call.epilogue != XD_GEMM_EPILOGUE_GELU && !(activated && call.d.type == DType::f32) &&
         (!call.c || call.d.type == DType::f32) && (!call.bias || adds_bias(call));
}

bool is_plain_for_cublasmp(const ProductCall& call) {
  const bool adds = call.c || call.bias || call.epilogue != XD_GEMM_EPILOGUE_NONE;
  return is_plain(call) && (call.operation == XD_GEMM_ALL_GATHER || !adds);
}

namespace {

// Both operands have such scales or none: those that are missing are 1.
void scale_by_blocks(ProductShape& shape) {
  shape.a_scale_mode = lt::kScaleVector128;
  shape.b_scale_mode = lt::kScaleBlock128;
}

}  // namespace

ProductShape product_shape(const ProductCall& call, std::int64_t rows, std::int64_t all_rows,
                           DType d_type, bool finished) {
  ProductShape shape{.m = rows,
                     .n = call.n,
                     .k = call.k,
                     .a_type = data_type(call.a.type),
                     .b_type = data_type(call.b.type),
                     .d_type = data_type(d_type),
                     .bias_type = data_type(d_type),
                     .transpose_a = call.transpose_a,
                     .transpose_b = call.transpose_b,
                     .a_pitch = call.transpose_a ? all_rows : call.k,
                     .b_pitch = call.transpose_b ? call.k : call.n,
                     .d_pitch = call.n,
                     .fast_accumulate = call.fast_accumulate && is_fp8(call.a.type) &&
                                        call.scaling != Scaling::blocks};
  if (call.a.type == DType::f32 && call.allow_tf32) shape.compute = lt::kComputeTf32;
  // cuBLASLt has scales per row for both operands or for none: product_pointers() adds those of 1.
  if (call.scaling == Scaling::rows) {
    shape.a_scale_mode = shape.b_scale_mode = lt::kScaleOuterVector;
  } else if (call.scaling == Scaling::tensor) {
    if (call.a_scale) shape.a_scale_mode = lt::kScaleScalar;
    if (call.b_scale) shape.b_scale_mode = lt::kScaleScalar;
  } else if (call.scaling == Scaling::blocks) {
    scale_by_blocks(shape);
  }
  if (!finished) return shape;
  int epilogue = 0;
  if (call.bias) epilogue |= lt::kEpilogueBias;
  if (call.epilogue == XD_GEMM_EPILOGUE_RELU) epilogue |= lt::kEpilogueRelu;
  if (epilogue != 0) shape.epilogue = epilogue;
  return shape;
}

std::uint64_t offset_of_tokens(const ProductCall& call, std::int64_t first) {
  const std::int64_t elements = call.transpose_a ? first : first * call.k;
  return static_cast<std::uint64_t>(elements) * dtype_bytes(call.a.type);
}

ProductPointers product_pointers(const ProductCall& call, std::int64_t first, void* d,
                                 const float* ones) {
  const auto* a_scale = call.a_scale.as<const float>();
  const auto* b_scale = call.b_scale.as<const float>();
  if (call.scaling == Scaling::rows) {
    a_scale = call.a_scale ? a_scale + first : ones;
    if (!call.b_scale) b_scale = ones;
  } else if (call.scaling == Scaling::blocks && call.a_scale) {
    a_scale += first * scale_blocks(call.k);
  }
  return {.a = call.a.data + offset_of_tokens(call, first),
          .b = call.b.data,
          .d = d,
          .bias = call.bias.data,
          .a_scale = a_scale,
          .b_scale = b_scale};
}

Epilogue epilogue_from(const ProductCall& call, std::int64_t first) {
  const auto from = [&](const Tensor& tensor) {
    return tensor ? tensor.data + static_cast<std::uint64_t>(first) * tensor.row_bytes() : nullptr;
  };
  return {.beta = call.beta,
          .c = call.beta != 0 ? from(call.c) : nullptr,
          .bias = call.bias.data,
          .activation = call.epilogue,
          .pre_activation = from(call.pre_activation),
          .d = from(call.d),
          .d_scale = call.d_scale.as<const float>(),
          .d_amax = call.d_amax.as<float>(),
          .exact = nullptr,
          .c_type = call.c.type,
          .bias_type = call.bias.type,
          .pre_type = call.pre_activation.type,
          .d_type = call.d.type};
}

std::vector<ProductShape> usual_shapes(const Config& config) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(config.type));
  const std::int64_t step = 16 / bytes;
  const auto whole = [&](std::int64_t columns) {
    return std::max<std::int64_t>(columns / step, 1) * step;
  };
  const bool fp8 = bytes == 1;
  ProductShape shape{.n = whole(config.max_n),
                     .k = config.max_k > 0 ? whole(config.max_k) : whole(config.max_n),
                     .a_type = data_type(config.type),
                     .b_type = data_type(config.type)};
  const DType stored = fp8 ? DType::bf16 : config.type;
  std::vector<ProductShape> shapes;
  const auto add = [&](DType d_type, int epilogue) {
    shape.d_type = shape.bias_type = data_type(d_type);
    shape.epilogue = epilogue;
    shapes.push_back(shape);
  };
  for (const auto& [a, b] : {std::pair{false, true}, {false, false}, {true, false}}) {
    if (fp8 && (a || !b)) continue;
    shape.transpose_a = a;
    shape.transpose_b = b;
    add(stored, lt::kEpilogueNone);
    if (!config.has(XD_GEMM_ALL_GATHER)) continue;
    if (stored != DType::f32) add(DType::f32, lt::kEpilogueNone);
    add(stored, lt::kEpilogueBias);
    if (stored != DType::f32) {
      add(stored, lt::kEpilogueRelu);
      add(stored, lt::kEpilogueBias | lt::kEpilogueRelu);
    }
  }
  return shapes;
}

std::vector<ProductShape> warmed_shapes(const Config& config) {
  std::vector<ProductShape> shapes = usual_shapes(config);
  for (std::size_t i = 0, usual = shapes.size(); i < usual; ++i) {
    ProductShape other = shapes[i];
    if (config.type == DType::f32) {
      other.compute = lt::kComputeTf32;
      shapes.push_back(other);
    }
    if (!is_fp8(config.type)) continue;
    for (const int mode : {lt::kScaleScalar, lt::kScaleOuterVector}) {
      other.a_scale_mode = other.b_scale_mode = mode;
      shapes.push_back(other);
    }
    if (other.epilogue != lt::kEpilogueNone) continue;
    scale_by_blocks(other);
    shapes.push_back(other);
  }
  return shapes;
}

namespace {

// The shapes that cuBLASLt stores for these operands: see is_plain().
void add_results(ProductShape shape, DType operands, std::vector<ProductShape>& to) {
  for (const DType d : {DType::f32, DType::bf16, DType::f16}) {
    if (!multiplies_into(operands, d)) continue;
    shape.d_type = shape.bias_type = data_type(d);
    for (const int epilogue : {lt::kEpilogueNone, lt::kEpilogueBias, lt::kEpilogueRelu,
                               lt::kEpilogueBias | lt::kEpilogueRelu}) {
      if (d == DType::f32 && (epilogue & lt::kEpilogueRelu) != 0) continue;
      shape.epilogue = epilogue;
      to.push_back(shape);
    }
  }
}

void add_fp8(DType a, DType b, std::vector<ProductShape>& to) {
  ProductShape shape{.a_type = data_type(a), .b_type = data_type(b)};
  constexpr std::pair<int, int> kModes[] = {{-1, -1},
                                            {lt::kScaleScalar, lt::kScaleScalar},
                                            {lt::kScaleScalar, -1},
                                            {-1, lt::kScaleScalar},
                                            {lt::kScaleOuterVector, lt::kScaleOuterVector}};
  for (const auto& [of_a, of_b] : kModes) {
    shape.a_scale_mode = of_a;
    shape.b_scale_mode = of_b;
    for (const bool fast : {false, true}) {
      shape.fast_accumulate = fast;
      add_results(shape, a, to);
    }
  }
  shape.fast_accumulate = false;
  shape.epilogue = lt::kEpilogueNone;
  scale_by_blocks(shape);
  for (const DType d : {DType::f32, DType::bf16}) {
    shape.d_type = shape.bias_type = data_type(d);
    to.push_back(shape);
  }
}

}  // namespace

std::vector<ProductShape> all_products() {
  std::vector<ProductShape> shapes;
  for (const auto& [a, b] : {std::pair{false, true}, {false, false}, {true, false}}) {
    for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
      ProductShape shape{
          .a_type = data_type(type), .b_type = data_type(type), .transpose_a = a, .transpose_b = b};
      add_results(shape, type, shapes);
      shape.compute = lt::kComputeTf32;
      if (type == DType::f32) add_results(shape, type, shapes);
    }
  }
  add_fp8(DType::e4m3, DType::e4m3, shapes);
  add_fp8(DType::e4m3, DType::e5m2, shapes);
  add_fp8(DType::e5m2, DType::e4m3, shapes);
  return shapes;
}

}  // namespace xd::gemm::cuda
