// The gated activation between an expert's two products, and its derivative. A warp takes a row at
// a time; blocks stride over the rows up to the end of the last zone, which the device knows.
//
//   memory                          written by       read by
//   gate, up, grad_out, weights,    the caller       the warp that has the row
//   offsets
//   out, out_scales, grad_gate,     the warp that    the caller
//   grad_up, grad_weights           has the row
#include "ep/experts/gated.h"

#include <type_traits>

#include "base/error.h"
#include "cuda/device.h"
#include "cuda/error.h"
#include "cuda/known_memory.h"
#include "ep/experts/cuda/experts.h"
#include "ep/experts/gated_math.h"
#include "ep/plan/cuda/codes.cuh"
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
  // If out is fp8.
  float* scales;
  std::int64_t scale_stride;  // elements from one row to the next
  QuantiseFormat codes;
};

__device__ std::int64_t bound_at(const GatedParams& p, const void* offset, std::int64_t otherwise) {
  if (offset == nullptr) return otherwise;
  const std::int64_t row = p.wide_offsets ? *static_cast<const std::int64_t*>(offset)
                                          : *static_cast<const std::int32_t*>(offset);
  return min(max(row, std::int64_t{0}), p.rows);
}

struct Arithmetic {
  __device__ static float larger(float x, float y) { return fmaxf(x, y); }
  // The compiler's own steps to 1 / x, but for its branch for numbers out of range: no branch keeps
  // a lane's elements apart.
  __device__ static float reciprocal(float x) {
    const float near = ptx::approximate_reciprocal(x);
    return __fmaf_rn(near, __fmaf_rn(-x, near, 1.0f), near);
  }
};

// The elements that a lane takes at a time, a vector of 16 bytes or one, and the word that they
// make in memory.
template <class T, bool kVectors>
struct Lane {
  static constexpr int kCount = kVectors ? T::kPerVector : 1;
  using Word = std::conditional_t<kVectors, uint4, std::uint32_t>;

  // `at`: in elements.
  __device__ static Word load(const Elements& from, std::int64_t row, std::int64_t at) {
    const std::byte* p = from.data + place_of(from, row, at);
    if constexpr (kVectors) {
      return ptx::ld_streaming(p);
    } else if constexpr (T::kBytes == 4) {
      return *reinterpret_cast<const std::uint32_t*>(p);
    } else {
      return *reinterpret_cast<const std::uint16_t*>(p);
    }
  }
  __device__ static void unpack(const Word& word, float* x) {
    if constexpr (kVectors) {
      T::unpack(word, x);
    } else {
      float all[T::kPerVector];
      T::unpack(make_uint4(word, 0, 0, 0), all);
      x[0] = all[0];
    }
  }
  __device__ static void store(const Elements& to, std::int64_t row, std::int64_t at,
                               const float* x) {
    std::byte* p = to.data + place_of(to, row, at);
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
  __device__ static std::int64_t place_of(const Elements& e, std::int64_t row, std::int64_t at) {
    return (row * e.row_stride + (kVectors ? at : at * e.col_stride)) * T::kBytes;
  }
};

// Computes a lane's elements of a row at `at`. Returns `sum` with their share of the gradient of
// the row's weight.
template <class T, xd_gated_activation kActivation, bool kBackward, bool kVectors, class Word>
__device__ float compute_piece(const GatedParams& p, std::int64_t row, std::int64_t at,
                               float weight, const Word& grads, const Word& gates, const Word& ups,
                               float sum) {
  using L = Lane<T, kVectors>;
  float grad[L::kCount], gate[L::kCount], up[L::kCount];
  if constexpr (kBackward) L::unpack(grads, grad);
  L::unpack(gates, gate);
  L::unpack(ups, up);
#pragma unroll
  for (int i = 0; i < L::kCount; ++i) {
    if constexpr (kBackward) {
      const gated::Gradients g =
          gated::backward<kActivation, Arithmetic>(grad[i], gate[i], up[i], weight);
      gate[i] = g.gate;
      up[i] = g.up;
      sum = __fadd_rn(sum, g.weight);
    } else {
      up[i] = gated::forward<kActivation, Arithmetic>(gate[i], up[i], weight);
    }
  }
  if constexpr (kBackward) L::store(p.grad_gate, row, at, gate);
  L::store(kBackward ? p.grad_up : p.out, row, at, up);
  return sum;
}

// Returns this lane's share of the gradient of the row's weight. Rows are cut into steps of so many
// pieces of 32 lanes that their loads overlap: all of a step's words are loaded before the first
// one is looked at.
template <class T, xd_gated_activation kActivation, bool kBackward, bool kVectors>
__device__ float compute_row(const GatedParams& p, std::int64_t row, float weight) {
  using L = Lane<T, kVectors>;
  using Word = typename L::Word;
  constexpr int kPieces = kBackward ? 2 : 4;
  float sum = 0.0f;
#pragma unroll 1
  for (std::int64_t first = lane_id() * L::kCount; first < p.columns;
       first += kPieces * 32 * L::kCount) {
    Word grad[kPieces], gate[kPieces], up[kPieces];
    // Calls body(j, at) for the pieces j of the step that lie in the row.
    const auto for_pieces = [&](auto&& body) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const std::int64_t at = first + j * (32 * L::kCount);
        if (at < p.columns) body(j, at);
      }
    };
    for_pieces([&](int j, std::int64_t at) {
      if constexpr (kBackward) grad[j] = L::load(p.grad_out, row, at);
      gate[j] = L::load(p.gate, row, at);
      up[j] = L::load(p.up, row, at);
    });
    for_pieces([&](int j, std::int64_t at) {
      sum = compute_piece<T, kActivation, kBackward, kVectors>(p, row, at, weight, grad[j], gate[j],
                                                               up[j], sum);
    });
  }
  return sum;
}

// Calls body(row, weight) for each row that this warp has. All lanes.
template <class Body>
__device__ __forceinline__ void for_own_rows(const GatedParams& p, Body&& body) {
  const std::int64_t begin = bound_at(p, p.first_offset, 0);
  const std::int64_t end = bound_at(p, p.last_offset, p.rows);
  const std::int64_t warps = std::int64_t{gridDim.x} * kWarps;
#pragma unroll 1
  for (std::int64_t row = begin + std::int64_t{blockIdx.x} * kWarps + warp_in_block(); row < end;
       row += warps) {
    body(row, p.weights != nullptr ? p.weights[row * p.weight_stride] : 1.0f);
  }
}

template <class T, xd_gated_activation kActivation, bool kBackward, bool kVectors>
__global__ void __launch_bounds__(kThreads, 3) gated_kernel(const __grid_constant__ GatedParams p) {
  for_own_rows(p, [&](std::int64_t row, float weight) {
    float sum = compute_row<T, kActivation, kBackward, kVectors>(p, row, weight);
    if (!kBackward || p.grad_weights == nullptr) return;
    sum = warp_sum(sum);
    if (lane_id() != 0) return;
    p.grad_weights[row * p.grad_weight_stride] = sum == sum ? sum : __uint_as_float(0x7FC00000u);
  });
}

// Puts a lane's numbers of a row, at `at`, into codes, and their block's scale beside. All lanes of
// a warp; those of a block have it whole. `there`: false behind the row's end.
template <int kCount>
__device__ void store_codes(const GatedParams& p, std::int64_t row, std::int64_t at, bool there,
                            float (&x)[kCount]) {
  constexpr int kLanes = static_cast<int>(kCodeBlock) / kCount;
  make_infinities_nan(x);
  float most = largest_of(x);
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(kWholeWarp, most, step));
  }
  if (!there) return;
  const CodeScale scale = code_scale(most, p.codes);
  *reinterpret_cast<Codes<kCount>*>(p.out.data + row * p.out.row_stride + at) =
      codes_of(x, scale.inverse);
  if (lane_id() % kLanes == 0) p.scales[row * p.scale_stride + at / kCodeBlock] = scale.scale;
}

// The forward call of a row with a result in fp8. Columns are multiples of a block.
template <class T, xd_gated_activation kActivation>
__device__ void code_row(const GatedParams& p, std::int64_t row, float weight) {
  using L = Lane<T, true>;
  constexpr int kPieces = 4;
#pragma unroll 1
  for (std::int64_t first = 0; first < p.columns; first += kPieces * 32 * L::kCount) {
    typename L::Word gate[kPieces], up[kPieces];
    const auto place = [&](int j) { return first + (j * 32 + lane_id()) * L::kCount; };
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      gate[j] = up[j] = make_uint4(0, 0, 0, 0);
      if (place(j) >= p.columns) continue;
      gate[j] = L::load(p.gate, row, place(j));
      up[j] = L::load(p.up, row, place(j));
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      float of_gate[L::kCount], x[L::kCount];
      L::unpack(gate[j], of_gate);
      L::unpack(up[j], x);
#pragma unroll
      for (int i = 0; i < L::kCount; ++i) {
        x[i] = gated::forward<kActivation, Arithmetic>(of_gate[i], x[i], weight);
      }
      store_codes(p, row, place(j), place(j) < p.columns, x);
    }
  }
}

template <class T, xd_gated_activation kActivation>
__global__ void __launch_bounds__(kThreads, 3)
    gated_codes_kernel(const __grid_constant__ GatedParams p) {
  for_own_rows(p,
               [&](std::int64_t row, float weight) { code_row<T, kActivation>(p, row, weight); });
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

template <class T>
GatedKernel codes_kernel_of(xd_gated_activation activation) {
  GatedKernel kernel = nullptr;
  gated::with_activation(activation, [&](auto constant) {
    kernel = gated_codes_kernel<T, decltype(constant)::value>;
  });
  return kernel;
}

GatedKernel codes_kernel_for(DType type, xd_gated_activation activation) {
  return type == DType::bf16  ? codes_kernel_of<Bf16>(activation)
         : type == DType::f16 ? codes_kernel_of<F16>(activation)
                              : codes_kernel_of<F32>(activation);
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
                 claim(c.offsets, true), claim(c.out), claim(c.out_scales), claim(c.grad_gate),
                 claim(c.grad_up), claim(c.grad_weights)});
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
  const auto load = [](GatedKernel kernel) {
    cudaFuncAttributes attributes{};
    XD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
  };
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (int number = XD_GATED_SILU; number <= XD_GATED_RELU_SQUARED; ++number) {
      const auto activation = static_cast<xd_gated_activation>(number);
      load(codes_kernel_for(type, activation));
      for (const bool backward : {false, true}) {
        for (const bool vectors : {false, true}) {
          load(kernel_for(type, activation, backward, vectors));
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
      .columns = call.gate.cols,
      .scales = call.out_scales ? call.out_scales.as<float>() : nullptr,
      .scale_stride = call.out_scales.row_stride,
      .codes = call.codes.codes};
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
  XD_REQUIRE(vectors || !call.codes,
             "gate, up, out: expected packed elements, and rows at multiples of ", kRowAlignment,
             " bytes, where out is fp8 on CUDA devices");
  const auto kernel = call.codes
                          ? codes_kernel_for(call.gate.type, call.activation)
                          : kernel_for(call.gate.type, call.activation, call.backward(), vectors);
  kernel<<<blocks, kThreads, 0, stream>>>(params);
  XD_CUDA_CHECK(cudaGetLastError());
}

}  // namespace xd::ep::cuda
