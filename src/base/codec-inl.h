// Conversions between payload types and float32 on vectors of 32-bit words, once per SIMD target.
//
// A word holds two 16-bit elements, even index in the low half, or one float32. Elements of a word
// are unpacked to one float vector per half (kInterleaved), so no lane ever moves: sums are
// elementwise, and packing undoes what unpacking did.
//
// The arithmetic is on integers, with two exceptions: denormal results are rounded by adding a
// constant whose last place is the format's, which is exact and out of reach of FTZ and DAZ; and
// fp16 uses the processor's own conversions where a target has them.

// Per-target include guard.
#if defined(CROSSDOCK_BASE_CODEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CROSSDOCK_BASE_CODEC_INL_H_
#undef CROSSDOCK_BASE_CODEC_INL_H_
#else
#define CROSSDOCK_BASE_CODEC_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace xd::rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// D is always a tag of uint32_t lanes; its float vector has the same lanes.
template <class D>
using FloatTag = hn::RebindToFloat<D>;
template <class D>
using Words = hn::Vec<D>;
template <class D>
using Floats = hn::Vec<FloatTag<D>>;

template <class D>
HWY_INLINE Words<D> bits(D d, Floats<D> v) {
  return hn::BitCast(d, v);
}

template <class D>
HWY_INLINE Floats<D> floats(D, Words<D> v) {
  return hn::BitCast(FloatTag<D>(), v);
}

template <class D>
HWY_INLINE hn::Mask<D> is_nan(D d, Floats<D> v) {
  return hn::RebindMask(d, hn::IsNaN(v));
}

// Returns a < b for words below 2^31. For those a signed comparison is right, and it is the cheap
// one.
template <class D>
HWY_INLINE hn::Mask<D> less(D d, Words<D> a, Words<D> b) {
  const hn::RebindToSigned<D> di;
  return hn::RebindMask(d, hn::Lt(hn::BitCast(di, a), hn::BitCast(di, b)));
}

// Adds half of the last place that stays when kDropped low bits are cut; ties go to even.
template <int kDropped, class D>
HWY_INLINE Words<D> round_up_bits(D d, Words<D> word) {
  const auto odd = hn::And(hn::ShiftRight<kDropped>(word), hn::Set(d, 1u));
  return hn::Add(hn::Add(word, hn::Set(d, (1u << (kDropped - 1)) - 1)), odd);
}

// A small float format, described by its number of mantissa bits and its exponent bias.
template <int kMantissa, int kBias>
struct SmallFloat {
  static constexpr int kDropped = 23 - kMantissa;
  static constexpr std::uint32_t kRebias = 127u - kBias;
  static constexpr std::uint32_t kMinNormal = (kRebias + 1) << 23;  // as float32 bits
  // The power of two whose last place in float32 is the format's smallest denormal.
  static constexpr std::uint32_t kDenormalMagic = (kRebias + 1 + kDropped) << 23;

  // The magnitude bits of |v|, which is given as float32 bits. They are right until the exponent
  // overflows.
  template <class D>
  static HWY_INLINE Words<D> round(D d, Words<D> magnitude) {
    const auto normal = hn::Sub(hn::ShiftRight<kDropped>(round_up_bits<kDropped>(d, magnitude)),
                                hn::Set(d, kRebias << kMantissa));
    const auto magic = hn::Set(d, kDenormalMagic);
    const auto denormal = hn::Sub(bits(d, hn::Add(floats(d, magnitude), floats(d, magic))), magic);
    return hn::IfThenElse(less(d, magnitude, hn::Set(d, kMinNormal)), denormal, normal);
  }
};

struct Bf16 {
  static constexpr std::size_t kPerWord = 2;
  static constexpr bool kInterleaved = true;

  template <class D>
  static HWY_INLINE void unpack(D d, Words<D> words, Floats<D>& even, Floats<D>& odd) {
    even = floats(d, hn::ShiftLeft<16>(words));
    odd = floats(d, hn::And(words, hn::Set(d, 0xffff0000u)));
  }
  template <class D>
  static HWY_INLINE Words<D> pack(D d, Floats<D> even, Floats<D> odd) {
    return hn::Or(hn::ShiftRight<16>(rounded_bits(d, even)), bits(d, round(d, odd)));
  }
  template <class D>
  static HWY_INLINE Floats<D> round(D d, Floats<D> v) {
    return floats(d, hn::And(rounded_bits(d, v), hn::Set(d, 0xffff0000u)));
  }

 private:
  // The result is in the upper half of each word; the lower half is not cleared.
  template <class D>
  static HWY_INLINE Words<D> rounded_bits(D d, Floats<D> v) {
    const auto quiet = hn::Or(bits(d, v), hn::Set(d, 0x00400000u));
    return hn::IfThenElse(is_nan(d, v), quiet, round_up_bits<16>(d, bits(d, v)));
  }
};

// These targets have instructions for fp16 that give the same bits; they ignore FTZ, DAZ and the
// rounding mode. Elements are unpacked to the lower and the upper half of the piece.
#if (HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL) && \
    !defined(HWY_DISABLE_F16C)

struct F16 {
  static constexpr std::size_t kPerWord = 2;
  static constexpr bool kInterleaved = false;

  template <class D>
  static HWY_INLINE void unpack(D d, Words<D> words, Floats<D>& lower, Floats<D>& upper) {
    const hn::Repartition<hwy::float16_t, D> whole;
    const auto halves = hn::BitCast(whole, words);
    lower = hn::PromoteTo(FloatTag<D>(), hn::LowerHalf(halves));
    upper = hn::PromoteTo(FloatTag<D>(), hn::UpperHalf(hn::Rebind<hwy::float16_t, D>(), halves));
  }
  template <class D>
  static HWY_INLINE Words<D> pack(D d, Floats<D> lower, Floats<D> upper) {
    const hn::Repartition<std::uint16_t, D> whole;
    return hn::BitCast(d, hn::Combine(whole, narrow(d, upper), narrow(d, lower)));
  }
  template <class D>
  static HWY_INLINE Floats<D> round(D, Floats<D> v) {
    return hn::PromoteTo(FloatTag<D>(), hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v));
  }

 private:
  template <class D>
  static HWY_INLINE auto narrow(D, Floats<D> v) {
    const auto half = hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v);
    return hn::BitCast(hn::Rebind<std::uint16_t, D>(), half);
  }
};

#else

struct F16 {
  static constexpr std::size_t kPerWord = 2;
  static constexpr bool kInterleaved = true;

  template <class D>
  static HWY_INLINE void unpack(D d, Words<D> words, Floats<D>& even, Floats<D>& odd) {
    even = widen(d, hn::And(words, hn::Set(d, 0xffffu)));
    odd = widen(d, hn::ShiftRight<16>(words));
  }
  template <class D>
  static HWY_INLINE Words<D> pack(D d, Floats<D> even, Floats<D> odd) {
    return hn::Or(narrow(d, even), hn::ShiftLeft<16>(narrow(d, odd)));
  }
  template <class D>
  static HWY_INLINE Floats<D> round(D d, Floats<D> v) {
    return widen(d, narrow(d, v));
  }

 private:
  template <class D>
  static HWY_INLINE Floats<D> widen(D d, Words<D> half) {
    const auto magnitude = hn::And(half, hn::Set(d, 0x7fffu));
    const auto rebias = hn::Set(d, 112u << 23);
    const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
    // Exponent 31 (infinity and NaN) becomes 255 by the same step once more.
    const auto large =
        hn::IfThenElse(less(d, magnitude, hn::Set(d, 0x7c00u)), normal, hn::Add(normal, rebias));
    const hn::RebindToSigned<D> di;
    const auto denormal = hn::Mul(hn::ConvertTo(FloatTag<D>(), hn::BitCast(di, magnitude)),
                                  hn::Set(FloatTag<D>(), 0x1p-24f));
    const auto value =
        hn::IfThenElse(less(d, magnitude, hn::Set(d, 0x400u)), bits(d, denormal), large);
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(d, 0x8000u)));
    return floats(d, hn::Or(value, sign));
  }
  template <class D>
  static HWY_INLINE Words<D> narrow(D d, Floats<D> v) {
    const auto magnitude = hn::And(bits(d, v), hn::Set(d, 0x7fffffffu));
    const auto sign = hn::And(hn::ShiftRight<16>(bits(d, v)), hn::Set(d, 0x8000u));
    const auto infinity = hn::Set(d, 0x7c00u);
    const auto payload = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 0x3ffu));
    const auto nan = hn::Or(payload, hn::Set(d, 0x7e00u));
    // Numbers from 2^16 on overflow. A number below that rounds up to 2^16 carries into infinity by
    // itself.
    const auto overflow = hn::IfThenElse(is_nan(d, v), nan, infinity);
    const auto finite = SmallFloat<10, 15>::round(d, magnitude);
    const auto value =
        hn::IfThenElse(less(d, magnitude, hn::Set(d, 0x47800000u)), finite, overflow);
    return hn::Or(value, sign);
  }
};

#endif  // instructions for fp16

struct F32 {
  static constexpr std::size_t kPerWord = 1;
  static constexpr bool kInterleaved = false;

  template <class D>
  static HWY_INLINE void unpack(D d, Words<D> words, Floats<D>& v, Floats<D>&) {
    v = floats(d, words);
  }
  template <class D>
  static HWY_INLINE Words<D> pack(D d, Floats<D> v, Floats<D>) {
    const auto quiet = hn::IfThenElseZero(is_nan(d, v), hn::Set(d, 0x00400000u));
    return hn::Or(bits(d, v), quiet);
  }
  template <class D>
  static HWY_INLINE Floats<D> round(D, Floats<D> v) {
    return v;
  }
};

}  // namespace xd::rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
