// combine under a wire other than SAME, between the GPUs of one host. Whether ranks have named
// hosts, and the way of quantising, are questions to the parameters: kernels differ in the payload
// type alone.
#include "ep/bulk/cuda/combine.cuh"
#include "ep/bulk/cuda/wire_sums.cuh"

namespace xd::ep::cuda {
namespace {

template <class Payload>
struct WireSums {
  using Params = WireCombineParams;
  using T = Payload;

  __device__ static std::uint64_t cell_bytes(const Params& p) { return p.cell_bytes; }
  // Strips of codes have whole vectors of scales.
  __device__ static Columns strip_of(const Params& p, int strip, int strips) {
    if (p.form != CellForm::codes) return Columns::strip_of(p.row_bytes, strip, strips);
    constexpr std::uint32_t kUnit = 4 * kCodeBlock / T::kPerVector;
    const auto vectors = static_cast<std::uint32_t>(p.row_bytes / 16);
    const std::uint32_t units = (vectors + kUnit - 1) / kUnit;
    const auto at = [&](std::uint32_t i) { return min(units * i / strips * kUnit, vectors); };
    return {at(strip), at(strip + 1)};
  }
  __device__ static bool by_host(const Params& p) { return p.host_keys != nullptr; }
  // The weights of sums at the source have no other use.
  __device__ static void note_own(WarpTerms& terms, int i, bool own) {
    terms.weight[i] = own ? 1.0f : 0.0f;
  }

  __device__ static void push(const Params& p, std::byte* to, std::byte* ring,
                              const WarpTerms& terms, int count, const Columns& columns) {
    if (count == 0) return;  // a damaged item
    if (p.form == CellForm::payload) {
      add_up<T>(to, ring, terms, count, false, columns.first, columns.last);
    } else if (p.weights != nullptr) {
      push_sum<true>(p, to, ring, terms, count, columns);
    } else {
      push_sum<false>(p, to, ring, terms, count, columns);
    }
  }

  __device__ static void sum(const Params& p, std::byte* out, std::byte* ring,
                             const WarpTerms& terms, int count, const HostPlace& place,
                             const Columns& columns) {
    if (count == 0) return zero_vectors(out, columns.first, columns.last);
    // A host's sum is rounded, also where it has one term.
    if (by_host(p) && __popc(place.ends) > 1) {
      return sum_hosts(p, out, ring, terms, count, place.ends, columns);
    }
    in_form(p, ring, terms, count, columns, [&]<class In>(In, auto& coming, const Columns& c) {
      sum_wire<T, In>(out, coming, count, c.first, c.last);
    });
  }

 private:
  __device__ static std::uint32_t columns_of(const Params& p) {
    return static_cast<std::uint32_t>(p.row_bytes / T::kBytes);
  }

  template <bool kWeighted>
  __device__ static void push_sum(const Params& p, std::byte* to, std::byte* ring,
                                  const WarpTerms& terms, int count, const Columns& columns) {
    const bool codes = p.form == CellForm::codes;
    for_each_sum<T, kWeighted>(ring, terms, count, columns.first, columns.last,
                               [&](std::uint32_t first, const PieceSum<T>& sum) {
                                 if (codes) {
                                   put_codes<T>(to, sum, p.codes, columns_of(p), first,
                                                columns.last);
                                 } else {
                                   put_numbers<T>(to, sum, first, columns.last);
                                 }
                               });
  }

  // Its registers are not those of the usual sum.
  __device__ __noinline__ static void sum_hosts(const Params& p, std::byte* out, std::byte* ring,
                                                const WarpTerms& terms, int count, unsigned ends,
                                                const Columns& columns) {
    in_form(p, ring, terms, count, columns, [&]<class In>(In, auto& coming, const Columns& c) {
      const bool rounds = p.form == CellForm::codes;
      sum_wire_by_host<T, In>(out, coming, count, ends, rounds, c.first, c.last);
    });
  }

  // Calls body(In{}, ring, columns) with the ring for the form of the cells, the type of its
  // numbers, and the columns in vectors of them.
  template <class Body>
  __device__ static void in_form(const Params& p, std::byte* ring, const WarpTerms& terms,
                                 int count, const Columns& c, Body&& body) {
    if (p.form == CellForm::codes) {
      CodeRing<T> coming(ring, terms, count, p.codes, columns_of(p), c.first, c.last);
      body(T{}, coming, c);
    } else if (p.form == CellForm::payload) {
      NumberRing<T> coming(ring, terms, count, c.first, c.last);
      body(T{}, coming, c);
    } else {
      constexpr std::uint32_t kMore = T::kPerVector / F32::kPerVector;
      const Columns floats{c.first * kMore, c.last * kMore};
      NumberRing<F32> coming(ring, terms, count, floats.first, floats.last);
      body(F32{}, coming, floats);
    }
  }
};

using WireKernel = void (*)(WireCombineParams);

WireKernel kernel_for(DType type) {
  return type == DType::bf16  ? combine_kernel<WireSums<Bf16>, false>
         : type == DType::f16 ? combine_kernel<WireSums<F16>, false>
                              : combine_kernel<WireSums<F32>, false>;
}

}  // namespace

void launch(const WireCombineParams& params, DType type, const LaunchShape& shape,
            cudaStream_t stream) {
  launch_cooperative(kernel_for(type), params, shape, stream);
}

void load_combine_wire(std::size_t shared_bytes) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    load_kernel(kernel_for(type), shared_bytes);
  }
}

}  // namespace xd::ep::cuda
