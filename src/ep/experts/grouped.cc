#include "ep/experts/grouped.h"

#include <crossdock/quantise.h>

#include <array>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "base/options.h"

namespace xd::ep {
namespace {

constexpr std::array kWideTypes = {DType::bf16, DType::f16, DType::f32};
constexpr std::array kProductTypes = {DType::bf16, DType::f16, DType::f32, DType::e4m3};
constexpr std::array kScaleTypes = {DType::f32};
constexpr std::array kOffsetTypes = {DType::i32, DType::i64};

// Scales of blocks along so many elements.
std::int64_t blocks_of(std::int64_t elements) {
  constexpr std::int64_t kBlock = XD_EP_QUANTISE_BLOCK(XD_EP_QUANTISE_FP8_BLOCK128);
  return (elements + kBlock - 1) / kBlock;
}

// A stride along an extent of 1 is never used and may be anything. It becomes one that all
// executors take: beyond `length` elements, and a multiple of 16.
std::int64_t any_stride(std::int64_t length) {
  return static_cast<std::int64_t>(round_up(at(length), 16));
}

// Checks that the elements of a row are packed.
void require_packed_rows(Tensor& tensor) {
  if (tensor.cols <= 1) tensor.col_stride = 1;
  if (tensor.rows <= 1) tensor.row_stride = any_stride(tensor.cols);
  if (tensor.bytes() == 0) return;
  XD_REQUIRE(tensor.col_stride == 1 && tensor.row_stride >= tensor.cols, tensor.name,
             ": has strides ", tensor.row_stride, " and ", tensor.col_stride,
             ", expected at least ", tensor.cols, " and 1");
}

Tensor read_rows(const DLTensor* tensor, const TensorSpec& spec) {
  Tensor read = read_tensor(tensor, spec);
  XD_REQUIRE(read.cols >= 1, spec.name, ".shape[1] = 0, expected at least 1");
  require_packed_rows(read);
  return read;
}

void read_strides(const DLTensor& user, bool output, Matrices& m) {
  m.row_stride = m.cols;
  m.stride = m.rows * m.cols;
  if (user.strides != nullptr) {
    m.stride = user.strides[0];
    m.row_stride = user.strides[1];
    m.col_stride = user.strides[2];
  }
  if (m.cols == 1) m.col_stride = m.row_stride == 1 && !output ? any_stride(m.rows) : 1;
  // Of fp8 columns are packed, be they of one element.
  const bool by_rows = m.col_stride == 1 && m.type != DType::e4m3;
  if (m.rows == 1) m.row_stride = by_rows ? any_stride(m.cols) : 1;
}

void require_strides(const Matrices& m, bool output) {
  constexpr std::int64_t kFarthest = std::int64_t{1} << 50;  // bytes to any element fit 64 bits
  const bool rows_packed = m.col_stride == 1 && m.row_stride >= m.cols;
  const bool columns_packed = m.row_stride == 1 && m.col_stride >= m.rows;
  XD_REQUIRE((rows_packed || (columns_packed && !output)) &&
                 m.line_stride() <= kFarthest / m.rows && m.line_stride() <= kFarthest / m.cols,
             m.name, ": has strides ", m.stride, ", ", m.row_stride, " and ", m.col_stride,
             output ? ", expected packed rows" : ", expected packed rows or packed columns");
  if (m.count == 1) return;
  const std::int64_t least = output ? (m.rows - 1) * m.row_stride + m.cols : 0;
  XD_REQUIRE(m.stride >= least && m.stride <= kFarthest / m.count, m.name, ": has stride ",
             m.stride, " along dimension 0, expected at least ", least);
}

}  // namespace

Matrices read_matrices(const DLTensor* user, const TensorSpec& spec) {
  XD_REQUIRE(user != nullptr, spec.name, " = NULL, expected a tensor");
  Matrices m{.name = spec.name,
             .data = static_cast<std::byte*>(user->data),
             .type = read_element_type(*user, spec),
             .count = user->shape[0],
             .rows = user->shape[1],
             .cols = user->shape[2]};
  XD_REQUIRE(m.count >= 1 && m.rows >= 1 && m.cols >= 1, spec.name, ": has shape [", m.count, ", ",
             m.rows, ", ", m.cols, "], expected at least 1 along each dimension");
  checked_mul(checked_mul(at(m.rows), at(m.cols), spec.name), at(m.count) * dtype_bytes(m.type),
              spec.name);
  const bool output = spec.fit == Fit::output;
  read_strides(*user, output, m);
  require_strides(m, output);
  XD_REQUIRE(m.data != nullptr, spec.name, ".data = NULL, expected ", m.count, " matrices");
  m.data += user->byte_offset;
  XD_REQUIRE(reinterpret_cast<std::uintptr_t>(m.data) % dtype_bytes(m.type) == 0, spec.name,
             ": data is at ", static_cast<const void*>(m.data), ", expected a ",
             dtype_bytes(m.type), "-byte aligned address");
  return m;
}

namespace {

void require_shape(const Matrices& m, std::int64_t rows, std::int64_t cols) {
  XD_REQUIRE(m.rows == rows && m.cols == cols, m.name, ": has matrices [", m.rows, ", ", m.cols,
             "], expected [", rows, ", ", cols, "]");
}

void require_output_type(const char* name, DType type, const Tensor& a) {
  const DType narrow = a.type == DType::e4m3 ? DType::bf16 : a.type;
  XD_REQUIRE(type == narrow || type == DType::f32, name, ": is ", dtype_name(type), ", expected ",
             dtype_name(narrow), " or float32 where a is ", dtype_name(a.type));
}

// The zones and the range of a call.
template <class Args>
void read_zones(const Args& args, DLDevice device, std::int64_t experts, DType d_type,
                GroupedCall& call) {
  call.offsets = read_tensor(
      args.offsets, {.name = "offsets", .ndim = 1, .types = kOffsetTypes, .device = device});
  XD_REQUIRE(call.offsets.rows == experts + 1, "offsets: has ", call.offsets.rows,
             " elements, expected ", experts + 1, " (experts + 1)");
  XD_REQUIRE(args.first_expert >= 0 && args.first_expert < experts,
             "first_expert = ", args.first_expert, ", expected 0 to ", experts - 1);
  const std::int64_t most = experts - args.first_expert;
  XD_REQUIRE(args.num_experts >= 0 && args.num_experts <= most, "num_experts = ", args.num_experts,
             ", expected 0 to ", most, " from expert ", args.first_expert, " on");
  call.first_expert = args.first_expert;
  call.num_experts = args.num_experts != 0 ? args.num_experts : static_cast<std::int32_t>(most);
  XD_REQUIRE(args.accumulate == 0 || args.accumulate == 1, "accumulate = ", args.accumulate,
             ", expected 0 or 1");
  call.accumulate = args.accumulate != 0;
  XD_REQUIRE(!call.accumulate || d_type == DType::f32, "d: is ", dtype_name(d_type),
             ", expected float32 where accumulate = 1");
}

// Scales of 128 elements of a row, and of 128 by 128 elements of a matrix.
void read_block_scales(const xd_grouped_product_args& args, DLDevice device,
                       GroupedProductCall& call) {
  call.a_scale = read_rows(
      args.a_scale,
      {.name = "a_scale", .ndim = 2, .types = kScaleTypes, .device = device, .fit = Fit::input});
  require_rows(call.a_scale, call.a.rows, "rows of a");
  require_cols(call.a_scale, blocks_of(call.k()), "ceil(K / 128)");
  call.b_blocks = read_matrices(
      args.b_scale,
      {.name = "b_scale", .ndim = 3, .types = kScaleTypes, .device = device, .fit = Fit::input});
  XD_REQUIRE(call.b_blocks.count == call.b.count, "b_scale: has ", call.b_blocks.count,
             " matrices, expected ", call.b.count, ", as b");
  require_shape(call.b_blocks, blocks_of(call.n()), blocks_of(call.k()));
  if (call.b_blocks.cols == 1) call.b_blocks.col_stride = 1;
  XD_REQUIRE(call.b_blocks.by_rows(), "b_scale: has stride ", call.b_blocks.col_stride,
             " along K, expected 1");
}

void read_scales(const xd_grouped_product_args& args, DLDevice device, GroupedProductCall& call) {
  const bool scaled = call.a.type == DType::e4m3;
  const auto read = [&](const DLTensor* tensor, const char* name, int ndim) {
    XD_REQUIRE(scaled || tensor == nullptr, name, ": is given, expected NULL where a is ",
               dtype_name(call.a.type));
    return read_tensor(
        tensor,
        {.name = name, .ndim = ndim, .types = kScaleTypes, .device = device, .optional = !scaled});
  };
  if (scaled && args.a_scale != nullptr && args.a_scale->ndim == 2) {
    read_block_scales(args, device, call);
  } else {
    call.a_scale = read(args.a_scale, "a_scale", 1);
    call.b_scale = read(args.b_scale, "b_scale", 2);
    if (!scaled) return;
    require_rows(call.a_scale, call.a.rows, "rows of a");
    require_rows(call.b_scale, call.b.count, "experts");
    require_cols(call.b_scale, call.n(), "columns of b");
  }
  XD_REQUIRE(call.b.row_stride == 1, "b: has stride ", call.b.row_stride,
             " along K, expected 1 where its type is float8_e4m3fn");
}

}  // namespace

Tensor Matrices::memory() const {
  const std::int64_t elements =
      (count - 1) * stride + (rows - 1) * row_stride + (cols - 1) * col_stride + 1;
  return {.name = name,
          .data = data,
          .type = type,
          .rows = elements,
          .cols = 1,
          .given = true,
          .row_stride = 1};
}

Matrices Matrices::transposed() const {
  Matrices other = *this;
  std::swap(other.rows, other.cols);
  std::swap(other.row_stride, other.col_stride);
  return other;
}

GroupedProductCall read_grouped(const xd_grouped_product_args* args, DLDevice device) {
  const auto in = read_struct("args", args, xd_grouped_product_args XD_GROUPED_PRODUCT_ARGS_INIT);
  GroupedProductCall call{};
  call.a = read_rows(
      in.a, {.name = "a", .ndim = 2, .types = kProductTypes, .device = device, .fit = Fit::input});
  call.b = read_matrices(
      in.b, {.name = "b", .ndim = 3, .types = kProductTypes, .device = device, .fit = Fit::input});
  XD_REQUIRE(call.b.type == call.a.type, "b: is ", dtype_name(call.b.type), ", expected ",
             dtype_name(call.a.type), ", as a");
  require_shape(call.b, call.a.cols, call.b.cols);
  call.d = read_rows(
      in.d, {.name = "d", .ndim = 2, .types = kWideTypes, .device = device, .fit = Fit::output});
  require_rows(call.d, call.a.rows, "rows of a");
  require_cols(call.d, call.n(), "columns of b");
  require_output_type("d", call.d.type, call.a);
  read_zones(in, device, call.b.count, call.d.type, call);
  read_scales(in, device, call);
  for (const Tensor& other : {call.a, call.b.memory(), call.offsets, call.a_scale,
                              call.has_blocks() ? call.b_blocks.memory() : call.b_scale}) {
    require_apart(call.d, other);
  }
  return call;
}

GroupedOuterCall read_grouped(const xd_grouped_outer_args* args, DLDevice device) {
  const auto in = read_struct("args", args, xd_grouped_outer_args XD_GROUPED_OUTER_ARGS_INIT);
  GroupedOuterCall call{};
  const auto rows = [&](const DLTensor* tensor, const char* name) {
    return read_rows(
        tensor,
        {.name = name, .ndim = 2, .types = kWideTypes, .device = device, .fit = Fit::input});
  };
  call.a = rows(in.a, "a");
  call.b = rows(in.b, "b");
  require_rows(call.b, call.a.rows, "rows of a");
  require_same_type(call.b, call.a);
  call.d = read_matrices(
      in.d, {.name = "d", .ndim = 3, .types = kWideTypes, .device = device, .fit = Fit::output});
  require_shape(call.d, call.a.cols, call.b.cols);
  require_output_type("d", call.d.type, call.a);
  read_zones(in, device, call.d.count, call.d.type, call);
  for (const Tensor& other : {call.a, call.b, call.offsets}) {
    require_apart(call.d.memory(), other);
  }
  return call;
}

}  // namespace xd::ep
