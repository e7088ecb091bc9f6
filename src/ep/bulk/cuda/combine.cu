// combine and dispatch_bwd whose partial sums cross in the payload type.
#include "ep/bulk/cuda/combine.cuh"

namespace xd::ep::cuda {
namespace {

// `kByHost`: the ranks have named several hosts.
template <class Payload, bool kByHost>
struct PlainSums {
  using Params = CombineParams;
  using T = Payload;

  __device__ static std::uint64_t cell_bytes(const Params& p) { return p.row_bytes; }
  __device__ static Columns strip_of(const Params& p, int strip, int strips) {
    return Columns::strip_of(p.row_bytes, strip, strips);
  }
  __device__ static constexpr bool by_host(const Params&) { return kByHost; }
  __device__ static void note_own(WarpTerms&, int, bool) {}
  __device__ static void push(const Params& p, std::byte* to, std::byte* ring,
                              const WarpTerms& terms, int count, const Columns& columns) {
    add_up<T>(to, ring, terms, count, p.weights != nullptr, columns.first, columns.last);
  }
  __device__ static void sum(const Params&, std::byte* out, std::byte* ring, const WarpTerms& terms,
                             int count, const HostPlace& place, const Columns& columns) {
    if (kByHost && place.needs_hosts(count)) {
      sum_by_host<T>(out, ring, terms, count, place.ends, columns.first, columns.last);
    } else {
      add_up<T>(out, ring, terms, count, false, columns.first, columns.last);
    }
  }
};

using CombineKernel = void (*)(CombineParams);

template <bool kByHost, bool kRemote = false>
CombineKernel kernel_for(DType type) {
  return type == DType::bf16  ? combine_kernel<PlainSums<Bf16, kByHost>, kRemote>
         : type == DType::f16 ? combine_kernel<PlainSums<F16, kByHost>, kRemote>
                              : combine_kernel<PlainSums<F32, kByHost>, kRemote>;
}

}  // namespace

void launch(const CombineParams& params, DType type, bool remote, const LaunchShape& shape,
            cudaStream_t stream) {
  // With several machines each of them is one host.
  const auto kernel = remote                        ? kernel_for<false, true>
                      : params.host_keys != nullptr ? kernel_for<true>
                                                    : kernel_for<false>;
  launch_cooperative(kernel(type), params, shape, stream);
}

void load_combine(std::size_t shared_bytes, bool remote) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    if (remote) {
      load_kernel(kernel_for<false, true>(type), shared_bytes);
    } else {
      load_kernel(kernel_for<false>(type), shared_bytes);
      load_kernel(kernel_for<true>(type), shared_bytes);
    }
  }
}

}  // namespace xd::ep::cuda
