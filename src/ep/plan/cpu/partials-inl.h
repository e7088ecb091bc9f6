// Partial sums of a token's rows in float32, once per SIMD target: rows.h says what they are.

// Per-target include guard.
#if defined(CROSSDOCK_EP_PLAN_CPU_PARTIALS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CROSSDOCK_EP_PLAN_CPU_PARTIALS_INL_H_
#undef CROSSDOCK_EP_PLAN_CPU_PARTIALS_INL_H_
#else
#define CROSSDOCK_EP_PLAN_CPU_PARTIALS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "base/codec-inl.h"
#include "ep/plan/cpu/rows.h"

HWY_BEFORE_NAMESPACE();
namespace xd::rows::HWY_NAMESPACE {

// Whether terms have weights is known to the compiler, so that the loop over rows does not ask.
template <class Codec, bool kWeighted, class D>
HWY_INLINE void load_term(D d, const Terms& terms, int row, std::size_t at, Floats<D>& even,
                          Floats<D>& odd) {
  Codec::unpack(d, hn::LoadU(d, static_cast<const std::uint32_t*>(terms.rows[row]) + at), even,
                odd);
  if constexpr (kWeighted) {
    const auto weight = hn::Set(FloatTag<D>(), terms.weights[row]);
    even = hn::Mul(even, weight);
    if constexpr (Codec::kPerWord == 2) odd = hn::Mul(odd, weight);
  }
}

template <class Codec, bool kWeighted, class D>
HWY_INLINE void sum_partial(D d, const Terms& terms, int begin, int end, std::size_t at,
                            Floats<D>& even, Floats<D>& odd) {
  load_term<Codec, kWeighted>(d, terms, begin, at, even, odd);
  for (int row = begin + 1; row < end; ++row) {
    auto next_even = even, next_odd = odd;
    load_term<Codec, kWeighted>(d, terms, row, at, next_even, next_odd);
    even = hn::Add(even, next_even);
    if constexpr (Codec::kPerWord == 2) odd = hn::Add(odd, next_odd);
  }
}

template <class D>
HWY_INLINE Floats<D> with_canonical_nan(D d, Floats<D> v) {
  return floats(d, hn::IfThenElse(is_nan(d, v), hn::Set(d, 0x7fc00000u), bits(d, v)));
}

}  // namespace xd::rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
