// The gated activation between an expert's two products, and its derivative. A warp takes a row at
// a time; blocks stride over the rows up to the end of the last zone, which the device knows.
//
//   memory                          written by       read by
//   gate, up, grad_out, weights,    the caller       the warp that has the row
//   offsets
//   out, grad_gate, grad_up,        the warp that    the caller
//   grad_weights                    has the row
#include "ep/experts/gated.h"

#include <type_traits>

#include "cuda/device.h"
#include "cuda/error.h"
#include "cuda/known_memory.h"
#include "ep/experts/cuda/experts.h"
#include "ep/experts/gated_math.h"
#include "ep/plan/cuda/sums.cuh"
#include "ep/plan/cuda/warp.cuh"

namespace xd::ep::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Rows of any strides, in elements.
struct Elements {
  std::byte* data;
  std::int64_t row_stride, col_stride;
};

struct GatedParams {
  Elements gate, up, out, grad_out, grad_gate, grad_up;
  const float* weights;  // nullptr = none
  float* grad_weights;
  std::int64_t weight_stride, grad_weight_stride;
  const void* first_offset;  // nullptr = rows count from 0 on
  const void* last_offset;   // nullptr = all rows count
  bool wide_offsets;         // int64
  std::int64_t rows, columns;
};

__device__ std::int64_t bound_at(const GatedParams& p, const void* offset, std::int64_t otherwise) {
  if (offset == nullptr) return otherwise;
  const std::int64_t row = p.wide_offsets ? *static_cast<const std::int64_t*>(offset)
                                          : *static_cast<const std::int32_t*>(offset);
  return min(max(row, std::int64_t{0}), p.rows);
}

// The elements that a lane takes at a time: a vector of 16 bytes, or one.
template <class T, bool kVectors>
struct Lane {
  static constexpr int kCount = kVectors ? T::kPerVector : 1;

  // `at`: in elements.
  __device__ static void load(const Elements& from, std::int64_t row, std::int64_t at, float* x) {
    const std::int64_t place = row * from.row_stride + at * from.col_stride;
    const std::byte* p = from.data + place * T::kBytes;
    if constexpr (kVectors) {
      T::unpack(ptx::ld_streaming(p), x);
    } else {
      float all[T::kPerVector];
      T::unpack(make_uint4(word_at(p), 0, 0, 0), all);
      x[0] = all[0];
    }
  }
  __device__ static void store(const Elements& to, std::int64_t row, std::int64_t at,
                               const float* x) {
    const std::int64_t place = row * to.row_stride + at * to.col_stride;
    std::byte* p = to.data + place * T::kBytes;
    if constexpr (kVectors) {
      ptx::st_streaming(p, pack<T>(x));
    } else {
      float all[T::kPerVector] = {};
      all[0] = x[0];
      const std::uint32_t word = pack<T>(all).x;
      if constexpr (T::kBytes == 4) {
        *reinterpret_cast<std::uint32_t*>(p) = word;
      } else {
        *reinterpret_cast<std::uint16_t*>(p) = static_cast<std::uint16_t>(word);
      }
    }
  }

 private:
  __device__ static std::uint32_t word_at(const std::byte* p) {
    if constexpr (T::kBytes == 4) return *reinterpret_cast<const std::uint32_t*>(p);
    return *reinterpret_cast<const std::uint16_t*>(p);
  }
};

// Rows are cut into steps of so many pieces of 32 lanes that their loads overlap.
constexpr int kPieces = 2;

// Calls body(j, at) for the pieces j of a step that lie in the row. `first`: where the step begins.
template <class L, class Body>
__device__ void for_pieces(std::int64_t first, std::int64_t columns, Body&& body) {
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const std::int64_t at = first + j * (32 * L::kCount);
    if (at < columns) body(j, at);
  }
}

// Returns this lane's share of the gradient of the row's weight.
template <class T, xd_gated_activation kActivation, bool kBackward, bool kVectors>
__device__ float compute_row(const GatedParams& p, std::int64_t row, float weight) {
  using L = Lane<T, kVectors>;
  float sum = 0.0f;
#pragma unroll 1
  for (std::int64_t first = lane_id() * L::kCount; first < p.columns;
       first += kPieces * 32 * L::kCount) {
    float grad[kPieces][L::kCount], gate[kPieces][L::kCount], up[kPieces][L::kCount];
    for_pieces<L>(first, p.columns, [&](int j, std::int64_t at) {
      if constexpr (kBackward) L::load(p.grad_out, row, at, grad[j]);
      L::load(p.gate, row, at, gate[j]);
      L::load(p.up, row, at, up[j]);
    });
    for_pieces<L>(first, p.columns, [&](int j, std::int64_t at) {
#pragma unroll
      for (int i = 0; i < L::kCount; ++i) {
        if constexpr (kBackward) {
          const gated::Gradients g =
              gated::backward<kActivation>(grad[j][i], gate[j][i], up[j][i], weight);
          gate[j][i] = g.gate;
          up[j][i] = g.up;
          sum = __fadd_rn(sum, g.weight);
        } else {
          up[j][i] = gated::forward<kActivation>(gate[j][i], up[j][i], weight);
        }
      }
      if constexpr (kBackward) L::store(p.grad_gate, row, at, gate[j]);
      L::store(kBackward ? p.grad_up : p.out, row, at, up[j]);
    });
  }
  return sum;
}

template <class T, xd_gated_activation kActivation, bool kBackward, bool kVectors>
__global__ void __launch_bounds__(kThreads) gated_kernel(const __grid_constant__ GatedParams p) {
  const std::int64_t begin = bound_at(p, p.first_offset, 0);
  const std::int64_t end = bound_at(p, p.last_offset, p.rows);
  const std::int64_t warps = std::int64_t{gridDim.x} * kWarps;
#pragma unroll 1
  for (std::int64_t row = begin + std::int64_t{blockIdx.x} * kWarps + warp_in_block(); row < end;
       row += warps) {
    const float weight = p.weights != nullptr ? p.weights[row * p.weight_stride] : 1.0f;
    float sum = compute_row<T, kActivation, kBackward, kVectors>(p, row, weight);
    if (!kBackward || p.grad_weights == nullptr) continue;
    sum = warp_sum(sum);
    if (lane_id() != 0) continue;
    p.grad_weights[row * p.grad_weight_stride] = sum == sum ? sum : __uint_as_float(0x7FC00000u);
  }
}

// ---- Launches ----------------------------------------------------------------------------------

using GatedKernel = void (*)(GatedParams);

template <class T, xd_gated_activation kActivation>
GatedKernel kernel_of(bool backward, bool vectors) {
  return backward  ? vectors ? gated_kernel<T, kActivation, true, true>
                             : gated_kernel<T, kActivation, true, false>
          : vectors ? gated_kernel<T, kActivation, false, true>
                   : gated_kernel<T, kActivation, false, false>;
}

GatedKernel kernel_for(DType type, xd_gated_activation activation, bool backward, bool vectors) {
  GatedKernel kernel = nullptr;
  gated::with_activation(activation, [&](auto constant) {
    constexpr xd_gated_activation kActivation = decltype(constant)::value;
    kernel = type == DType::bf16  ? kernel_of<Bf16, kActivation>(backward, vectors)
             : type == DType::f16 ? kernel_of<F16, kActivation>(backward, vectors)
                                  : kernel_of<F32, kActivation>(backward, vectors);
  });
  return kernel;
}

Elements elements_of(const Tensor& tensor) {
  return {tensor ? tensor.data : nullptr, tensor.row_stride, tensor.col_stride};
}

void require_memory(const GatedCall& c, xd::cuda::KnownMemory& known) {
  using xd::cuda::claim;
  known.require({claim(c.grad_out), claim(c.gate), claim(c.up), claim(c.weights),
                 claim(c.offsets, true), claim(c.out), claim(c.grad_gate), claim(c.grad_up),
                 claim(c.grad_weights)});
}

// True if lanes can load and store vectors.
bool fits_vectors(const Tensor& tensor) {
  if (!tensor) return true;
  const auto element = static_cast<std::int64_t>(dtype_bytes(tensor.type));
  const auto alignment = static_cast<std::int64_t>(kRowAlignment);
  return (tensor.cols <= 1 || tensor.col_stride == 1) && tensor.cols * element % alignment == 0 &&
         (tensor.rows <= 1 || tensor.row_stride * element % alignment == 0) &&
         reinterpret_cast<std::uintptr_t>(tensor.data) % kRowAlignment == 0;
}

}  // namespace

void load_gated() {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (int activation = XD_GATED_SILU; activation <= XD_GATED_RELU_SQUARED; ++activation) {
      for (const bool backward : {false, true}) {
        for (const bool vectors : {false, true}) {
          cudaFuncAttributes attributes{};
          const auto kernel =
              kernel_for(type, static_cast<xd_gated_activation>(activation), backward, vectors);
          XD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
        }
      }
    }
  }
}

void start_gated(const GatedCall& call, const DLDevice& device, cudaStream_t stream) {
  const xd::cuda::DeviceGuard guard(device.device_id);
  require_memory(call, xd::cuda::KnownMemory::of(device.device_id));
  if (call.gate.rows == 0) return;
  const bool wide = call.offsets && call.offsets.type == DType::i64;
  const auto offset_of = [&](std::int32_t expert) {
    return call.offsets.data + expert * std::int64_t{wide ? 8 : 4};
  };
  const GatedParams params{
      .gate = elements_of(call.gate),
      .up = elements_of(call.up),
      .out = elements_of(call.out),
      .grad_out = elements_of(call.grad_out),
      .grad_gate = elements_of(call.grad_gate),
      .grad_up = elements_of(call.grad_up),
      .weights = call.weights ? call.weights.as<float>() : nullptr,
      .grad_weights = call.grad_weights ? call.grad_weights.as<float>() : nullptr,
      .weight_stride = call.weights.row_stride,
      .grad_weight_stride = call.grad_weights.row_stride,
      .first_offset = call.first_expert > 0 ? offset_of(call.first_expert) : nullptr,
      .last_offset = call.offsets ? offset_of(call.end_expert) : nullptr,
      .wide_offsets = wide,
      .rows = call.gate.rows,
      .columns = call.gate.cols};
  bool vectors = true;
  for (const Tensor* tensor :
       {&call.gate, &call.up, &call.out, &call.grad_out, &call.grad_gate, &call.grad_up}) {
    vectors = vectors && fits_vectors(*tensor);
  }
  // Many more blocks than a device holds at a time, so that all multiprocessors end together; but
  // those behind the last zone cost time, too.
  constexpr std::int64_t kMostBlocks = 8192;
  const auto blocks =
      static_cast<unsigned>(std::min((params.rows + kWarps - 1) / kWarps, kMostBlocks));
  const auto kernel = kernel_for(call.gate.type, call.activation, call.backward(), vectors);
  kernel<<<blocks, kThreads, 0, stream>>>(params);
  XD_CUDA_CHECK(cudaGetLastError());
}

}  // namespace xd::ep::cuda
