// Grouped products on CUDA devices: the host's part of kernel.cu.
#include <algorithm>

#include "base/error.h"
#include "base/math.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/error.h"
#include "cuda/known_memory.h"
#include "ep/experts/cuda/experts.h"
#include "ep/experts/cuda/grouped/params.h"

namespace xd::ep::cuda {
namespace {

using xd::cuda::claim;
using xd::cuda::KnownMemory;

bool has_tensor_cores(int device) {
  int major = 0, minor = 0;
  XD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  XD_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major == 9 && minor == 0;
}

void require_support(const GroupedCall& call, std::int64_t k, std::int64_t n, int device) {
  // Kernels count rows and columns up to the ends of tiles in 32 bits.
  constexpr std::int64_t kMost = std::int64_t{INT32_MAX} - 511;
  if (std::max({call.a.rows, k, n}) > kMost) {
    fail(XD_ERROR_UNSUPPORTED, "R = ", call.a.rows, ", K = ", k, ", N = ", n, ", expected at most ",
         kMost, " on CUDA devices");
  }
  if (!has_tensor_cores(device)) {
    fail(XD_ERROR_UNSUPPORTED, xd::cuda::describe_device(device),
         ": grouped products expect compute capability 9.0");
  }
  if (call.a.type == DType::f32) {
    fail(XD_ERROR_UNSUPPORTED,
         "a: is float32, expected bfloat16, float16 or float8_e4m3fn on CUDA devices");
  }
}

// Copies of boxes, and stores of vectors, want it.
void require_aligned(const char* name, const std::byte* data, std::int64_t row_stride,
                     std::int64_t stride, DType type) {
  const auto element = static_cast<std::int64_t>(dtype_bytes(type));
  const auto alignment = static_cast<std::int64_t>(kRowAlignment);
  XD_REQUIRE(reinterpret_cast<std::uintptr_t>(data) % kRowAlignment == 0 &&
                 row_stride * element % alignment == 0 && stride * element % alignment == 0,
             name, ": is at ", static_cast<const void*>(data), " with strides of ",
             row_stride * element, " and ", stride * element, " bytes, expected multiples of ",
             alignment, " on CUDA devices");
}

void require_aligned(const Tensor& t) { require_aligned(t.name, t.data, t.row_stride, 0, t.type); }

void require_aligned(const Matrices& m) {
  require_aligned(m.name, m.data, m.line_stride(), m.count > 1 ? m.stride : 0, m.type);
}

CUtensorMapDataType map_type(DType type) {
  return type == DType::bf16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
         : type == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                              : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

// A map of `matrices`, of which boxes hold 128 bytes of `lines` lines, or of 64 lines if they lie
// across.
CUtensorMap map_of(const Matrices& m, Lie lie, int lines) {
  const auto element = dtype_bytes(m.type);
  const bool by_rows = m.by_rows();
  const cuuint64_t extents[] = {at(by_rows ? m.cols : m.rows), at(by_rows ? m.rows : m.cols),
                                at(m.count)};
  const std::uint64_t row_bytes = at(m.line_stride()) * element;
  // Of a single matrix the stride means nothing, but is looked at.
  const cuuint64_t strides[] = {row_bytes,
                                m.count > 1 ? at(m.stride) * element : row_bytes * extents[1]};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(kLineBytes / element),
                            static_cast<cuuint32_t>(lie == Lie::across ? 64 : lines), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult result = xd::cuda::driver().cuTensorMapEncodeTiled(
      &map, map_type(m.type), 3, m.data, extents, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail(XD_ERROR_UNSUPPORTED, m.name, ": the driver takes no tensor of [", m.count, ", ",
         extents[1], ", ", extents[0], "] with strides of ", strides[1], " and ", strides[0],
         " bytes (CUresult ", int{result}, ")");
  }
  return map;
}

Matrices as_matrices(const Tensor& t) {
  return {.name = t.name,
          .data = t.data,
          .type = t.type,
          .count = 1,
          .rows = t.rows,
          .cols = t.cols,
          .row_stride = t.row_stride};
}

std::int64_t tiles_of(std::int64_t extent, int of_tile) { return (extent + of_tile - 1) / of_tile; }

GroupedParams params_of(const GroupedCall& call) {
  return {.a = {},
          .b = {},
          .offsets = call.offsets.data,
          .wide_offsets = call.offsets.type == DType::i64,
          .first_expert = call.first_expert,
          .num_experts = call.num_experts,
          .rows = static_cast<std::int32_t>(call.a.rows),
          .k = 0,
          .n = 0,
          .d = nullptr,
          .d_type = DType::f32,
          .accumulate = call.accumulate,
          .d_row_stride = 0,
          .d_stride = 0,
          .a_scale = nullptr,
          .b_scale = nullptr,
          .a_scale_stride = 0,
          .b_scale_stride = 0,
          .b_scale_row_stride = 0};
}

void set_scales(const GroupedProductCall& call, GroupedParams& params) {
  if (!call.a_scale) return;
  params.a_scale = call.a_scale.as<float>();
  if (!call.has_blocks()) {
    params.b_scale = call.b_scale.as<float>();
    return;
  }
  params.b_scale = reinterpret_cast<const float*>(call.b_blocks.data);
  params.a_scale_stride = call.a_scale.row_stride;
  params.b_scale_stride = call.b_blocks.count > 1 ? call.b_blocks.stride : 0;
  params.b_scale_row_stride = call.b_blocks.row_stride;
}

void launch(const GroupedKind& kind, const GroupedParams& params, std::int64_t tiles,
            cudaStream_t stream) {
  XD_REQUIRE(tiles <= INT32_MAX, "d: has up to ", tiles, " tiles of ", kind.tile_rows, " by ",
             kind.tile_columns(), ", expected at most ", INT32_MAX);
  launch_grouped(kind, params, static_cast<int>(tiles), stream);
}

}  // namespace

void load_grouped() {
  int device = 0;
  XD_CUDA_CHECK(cudaGetDevice(&device));
  if (has_tensor_cores(device)) load_grouped_kernels();
}

void check_grouped_product(const GroupedProductCall& call, const DLDevice& device) {
  const xd::cuda::DeviceGuard guard(device.device_id);
  require_support(call, call.k(), call.n(), device.device_id);
  KnownMemory::of(device.device_id)
      .require({claim(call.a), claim(call.b.memory()), claim(call.offsets, true),
                claim(call.a_scale),
                claim(call.has_blocks() ? call.b_blocks.memory() : call.b_scale), claim(call.d)});
  if (call.a.rows == 0) return;
  require_aligned(call.a);
  require_aligned(call.b);
  require_aligned(call.d);
}

void check_grouped_outer(const GroupedOuterCall& call, const DLDevice& device) {
  const xd::cuda::DeviceGuard guard(device.device_id);
  require_support(call, call.d.rows, call.d.cols, device.device_id);
  KnownMemory::of(device.device_id)
      .require({claim(call.a), claim(call.b), claim(call.offsets, true), claim(call.d.memory())});
  require_aligned(call.d);
  if (call.a.rows == 0) return;  // no tile loads anything
  require_aligned(call.a);
  require_aligned(call.b);
}

void start_grouped_product(const GroupedProductCall& call, const DLDevice& device,
                           cudaStream_t stream) {
  check_grouped_product(call, device);
  const xd::cuda::DeviceGuard guard(device.device_id);
  if (call.a.rows == 0) return;
  // Small tiles where zones are small, as far as the host can tell.
  const GroupedKind kind{.type = call.a.type,
                         .outer = false,
                         .b = call.b.by_rows() ? Lie::across : Lie::lines,
                         .tile_rows = call.a.rows <= 64 * call.b.count ? 64 : 128,
                         .block_scales = call.has_blocks()};
  GroupedParams params = params_of(call);
  params.a = map_of(as_matrices(call.a), Lie::lines, kind.tile_rows);
  params.b = map_of(call.b, kind.b, kind.tile_columns());
  params.k = static_cast<std::int32_t>(call.k());
  params.n = static_cast<std::int32_t>(call.n());
  params.d = call.d.data;
  params.d_type = call.d.type;
  params.d_row_stride = call.d.row_stride;
  set_scales(call, params);
  // Each zone has at most one tile that is not full.
  const std::int64_t high = std::min(call.a.rows / kind.tile_rows + call.num_experts,
                                     tiles_of(call.a.rows, kind.tile_rows) * call.num_experts);
  launch(kind, params, high * tiles_of(call.n(), kind.tile_columns()), stream);
}

void start_grouped_outer(const GroupedOuterCall& call, const DLDevice& device,
                         cudaStream_t stream) {
  check_grouped_outer(call, device);
  const xd::cuda::DeviceGuard guard(device.device_id);
  const GroupedKind kind{.type = call.a.type, .outer = true, .b = Lie::across, .tile_rows = 128};
  GroupedParams params = params_of(call);
  if (call.a.rows > 0) {  // else no tile loads anything
    params.a = map_of(as_matrices(call.a), Lie::across, kind.tile_rows);
    params.b = map_of(as_matrices(call.b), Lie::across, kind.tile_columns());
  }
  params.k = static_cast<std::int32_t>(call.d.rows);
  params.n = static_cast<std::int32_t>(call.d.cols);
  params.d = call.d.data;
  params.d_type = call.d.type;
  params.d_row_stride = call.d.row_stride;
  params.d_stride = call.d.stride;
  const std::int64_t tiles = tiles_of(call.d.rows, kind.tile_rows) *
                             tiles_of(call.d.cols, kind.tile_columns()) * call.num_experts;
  launch(kind, params, tiles, stream);
}

}  // namespace xd::ep::cuda
