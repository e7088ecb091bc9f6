// Compile with -ffp-contract=off: a fused multiply-add would change the bits on some targets.
#include "gemm/cpu/elements.h"

#include <array>
#include <bit>
#include <cstring>

#include "base/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/cpu/elements.cc"
#include <hwy/foreach_target.h>
// These headers have to come after foreach_target.h.
#include <hwy/highway.h>

#include "base/codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace xd::gemm::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace codec = xd::rows::HWY_NAMESPACE;

using Word = hn::ScalableTag<std::uint32_t>;
using Float = hn::ScalableTag<float>;
using Vector = hn::Vec<Float>;

// ---- Conversions ------------------------------------------------------------------------------

// Calls body(in, out) for whole pieces of `step` elements. The rest goes through buffers of one
// piece, so that nothing behind the ends is touched.
template <std::size_t kMost, class In, class Out, class Body>
HWY_INLINE void by_pieces(const In* in, Out* out, std::size_t n, std::size_t step,
                          const Body& body) {
  std::size_t i = 0;
  for (; i + step <= n; i += step) body(in + i, out + i);
  if (i == n) return;
  In last_in[kMost] = {};
  Out last_out[kMost];
  std::memcpy(last_in, in + i, (n - i) * sizeof(In));
  body(static_cast<const In*>(last_in), static_cast<Out*>(last_out));
  std::memcpy(out + i, last_out, (n - i) * sizeof(Out));
}

constexpr std::size_t kMostWords = HWY_MAX_BYTES / sizeof(std::uint32_t);

template <class Codec>
void widen_halves(float* out, const std::uint16_t* in, std::size_t n) {
  const Word d;
  const Float df;
  const auto piece = [=](const std::uint16_t* from, float* to) HWY_ATTR {
    auto first = hn::Zero(df), second = first;
    Codec::unpack(d, hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(from)), first, second);
    if constexpr (Codec::kInterleaved) {
      hn::StoreInterleaved2(first, second, df, to);
    } else {
      hn::StoreU(first, df, to);
      hn::StoreU(second, df, to + hn::Lanes(df));
    }
  };
  by_pieces<2 * kMostWords>(in, out, n, 2 * hn::Lanes(d), piece);
}

HWY_INLINE Vector with_plain_nan(Vector v) {
  const Float df;
  return hn::IfThenElse(hn::IsNaN(v), hn::BitCast(df, hn::Set(Word(), 0x7fc00000u)), v);
}

template <class Codec>
void narrow_halves(std::uint16_t* out, const float* in, std::size_t n) {
  const Word d;
  const Float df;
  const auto piece = [=](const float* from, std::uint16_t* to) HWY_ATTR {
    auto first = hn::Zero(df), second = first;
    if constexpr (Codec::kInterleaved) {
      hn::LoadInterleaved2(df, from, first, second);
    } else {
      first = hn::LoadU(df, from);
      second = hn::LoadU(df, from + hn::Lanes(df));
    }
    const auto words = Codec::pack(d, with_plain_nan(first), with_plain_nan(second));
    hn::StoreU(words, d, reinterpret_cast<std::uint32_t*>(to));
  };
  by_pieces<2 * kMostWords>(in, out, n, 2 * hn::Lanes(d), piece);
}

void widen_bf16(float* out, const std::uint16_t* in, std::size_t n) {
  widen_halves<codec::Bf16>(out, in, n);
}
void widen_f16(float* out, const std::uint16_t* in, std::size_t n) {
  widen_halves<codec::F16>(out, in, n);
}
void narrow_bf16(std::uint16_t* out, const float* in, std::size_t n) {
  narrow_halves<codec::Bf16>(out, in, n);
}
void narrow_f16(std::uint16_t* out, const float* in, std::size_t n) {
  narrow_halves<codec::F16>(out, in, n);
}

void narrow_f32(float* out, const float* in, std::size_t n) {
  const Float df;
  const auto piece = [=](const float* from, float* to)
                         HWY_ATTR { hn::StoreU(with_plain_nan(hn::LoadU(df, from)), df, to); };
  by_pieces<kMostWords>(in, out, n, hn::Lanes(df), piece);
}

// `largest`: bits of the type's largest number, as a float32.
template <class Codec>
void narrow_bytes(std::uint8_t* out, const float* in, std::size_t n, std::uint32_t largest) {
  const Word d;
  const Float df;
  const hn::Rebind<std::int32_t, Word> di;
  const hn::Rebind<std::uint8_t, Word> d8;
  const auto piece = [=](const float* from, std::uint8_t* to) HWY_ATTR {
    const auto v = hn::LoadU(df, from);
    const auto word = hn::BitCast(d, v);
    const auto sign = hn::And(hn::ShiftRight<24>(word), hn::Set(d, 0x80u));
    const auto magnitude = hn::And(word, hn::Set(d, 0x7fffffffu));
    const auto most = hn::Set(d, largest);
    const auto limited = hn::IfThenElse(codec::less(d, magnitude, most), magnitude, most);
    const auto rounded = hn::Or(Codec::round(d, limited), sign);
    const auto bits = hn::IfThenElse(codec::is_nan(d, v), hn::Set(d, 0x7fu), rounded);
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(di, bits)), d8, to);
  };
  by_pieces<kMostWords>(in, out, n, hn::Lanes(d), piece);
}

void narrow_e4m3(std::uint8_t* out, const float* in, std::size_t n) {
  narrow_bytes<codec::SmallFloat<3, 7>>(out, in, n, 0x43e00000u);  // 448
}
void narrow_e5m2(std::uint8_t* out, const float* in, std::size_t n) {
  narrow_bytes<codec::SmallFloat<2, 15>>(out, in, n, 0x47600000u);  // 57344
}

// ---- Arithmetic -------------------------------------------------------------------------------

// x[i] = body(x[i], y[i]); y may be x.
template <class Body>
HWY_INLINE void update(float* x, const float* y, std::size_t n, const Body& body) {
  const Float df;
  const std::size_t step = hn::Lanes(df);
  std::size_t i = 0;
  for (; i + step <= n; i += step) {
    hn::StoreU(body(hn::LoadU(df, x + i), hn::LoadU(df, y + i)), df, x + i);
  }
  if (i == n) return;
  float last_x[kMostWords] = {}, last_y[kMostWords] = {};
  std::memcpy(last_x, x + i, (n - i) * sizeof(float));
  std::memcpy(last_y, y + i, (n - i) * sizeof(float));
  hn::StoreU(body(hn::LoadU(df, last_x), hn::LoadU(df, last_y)), df, last_x);
  std::memcpy(x + i, last_x, (n - i) * sizeof(float));
}

void scale(float* x, float factor, std::size_t n) {
  const auto f = hn::Set(Float(), factor);
  update(x, x, n, [=](auto v, auto) HWY_ATTR { return hn::Mul(v, f); });
}
void scale_by(float* x, const float* factors, std::size_t n) {
  update(x, factors, n, [](auto v, auto f) HWY_ATTR { return hn::Mul(v, f); });
}
void add(float* x, const float* y, std::size_t n) {
  update(x, y, n, [](auto v, auto w) HWY_ATTR { return hn::Add(v, w); });
}
void add_scaled(float* x, const float* y, float factor, std::size_t n) {
  const auto f = hn::Set(Float(), factor);
  update(x, y, n, [=](auto v, auto w) HWY_ATTR { return hn::Add(v, hn::Mul(w, f)); });
}

// Limits numbers to [-most, most], and leaves a NaN as it is: Min and Max differ about that.
HWY_INLINE Vector limit(Vector v, float most) {
  const Float df;
  const auto high = hn::Set(df, most), low = hn::Set(df, -most);
  return hn::IfThenElse(hn::Gt(v, high), high, hn::IfThenElse(hn::Lt(v, low), low, v));
}

// e to the power of v, from 0 to infinity. v = n * ln 2 + r with |r| <= ln 2 / 2; ln 2 is
// subtracted in two parts, of which the first times n is exact; e^r is its Taylor polynomial.
HWY_INLINE Vector exponential(Vector v) {
  const Float df;
  const hn::Rebind<std::int32_t, Float> di;
  const auto x = limit(v, 104.0f);
  const auto n = hn::Round(hn::Mul(x, hn::Set(df, 1.44269504f)));
  auto r = hn::Sub(x, hn::Mul(n, hn::Set(df, 0.693359375f)));
  r = hn::Sub(r, hn::Mul(n, hn::Set(df, -2.12194440e-4f)));
  auto p = hn::Set(df, 1.0f / 5040);
  for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    p = hn::Add(hn::Mul(p, r), hn::Set(df, coefficient));
  }
  // 2^n in two factors, as n may be beyond the exponents of float32. A NaN has gone into p.
  const auto whole = hn::ConvertTo(di, hn::IfThenElseZero(hn::Eq(n, n), n));
  const auto half = hn::ShiftRight<1>(whole);
  const auto power = [=](auto e) HWY_ATTR {
    return hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(e, hn::Set(di, 127))));
  };
  return hn::Mul(hn::Mul(p, power(half)), power(hn::Sub(whole, half)));
}

constexpr float kRootTwoByPi = 0.797884561f, kCubic = 0.044715f;

// (1 + tanh(u)) / 2 = 1 / (1 + e^(-2u)) with u = sqrt(2/pi) * (x + 0.044715 x^3).
HWY_INLINE Vector gate_divisor(Vector x) {
  const Float df;
  const auto cube = hn::Mul(hn::Mul(x, x), x);
  const auto inner = hn::Add(x, hn::Mul(cube, hn::Set(df, kCubic)));
  const auto e = exponential(hn::Mul(inner, hn::Set(df, -2 * kRootTwoByPi)));
  return hn::Add(hn::Set(df, 1.0f), e);
}

void gelu(float* x, std::size_t n) {
  update(x, x, n, [](auto v, auto) HWY_ATTR { return hn::Div(v, gate_divisor(v)); });
}

void dgelu(float* x, const float* pre_activation, std::size_t n) {
  update(x, pre_activation, n, [](auto v, auto pre) HWY_ATTR {
    const Float df;
    const auto one = hn::Set(df, 1.0f);
    const auto p = limit(pre, 16.0f);  // beyond, the derivative is 0 or 1
    const auto gate = hn::Div(one, gate_divisor(p));
    // 2u' = sqrt(2/pi) * (2 + 6 * 0.044715 p^2)
    const auto slope =
        hn::Mul(hn::Set(df, kRootTwoByPi),
                hn::Add(hn::Set(df, 2.0f), hn::Mul(hn::Mul(p, p), hn::Set(df, 6 * kCubic))));
    const auto bend = hn::Mul(hn::Mul(p, slope), hn::Mul(gate, hn::Sub(one, gate)));
    return hn::Mul(v, hn::Add(gate, bend));
  });
}

void relu(float* x, std::size_t n) {
  update(x, x, n, [](auto v, auto) HWY_ATTR {
    const auto zero = hn::Zero(Float());
    return hn::IfThenElse(hn::Lt(v, zero), zero, v);
  });
}

void drelu(float* x, const float* pre_activation, std::size_t n) {
  update(x, pre_activation, n, [](auto v, auto pre) HWY_ATTR {
    return hn::IfThenElseZero(hn::Gt(pre, hn::Zero(Float())), v);
  });
}

std::uint32_t largest_magnitude(const float* x, std::size_t n) {
  const hn::Rebind<std::int32_t, Float> di;  // magnitudes are below 2^31, where both orders agree
  const Float df;
  auto largest = hn::Zero(di);
  std::size_t i = 0;
  for (; i + hn::Lanes(df) <= n; i += hn::Lanes(df)) {
    const auto bits = hn::BitCast(di, hn::LoadU(df, x + i));
    largest = hn::Max(largest, hn::And(bits, hn::Set(di, 0x7fffffff)));
  }
  auto most = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest)));
  for (; i < n; ++i) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

}  // namespace xd::gemm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace xd::gemm::cpu {

HWY_EXPORT(widen_bf16);
HWY_EXPORT(widen_f16);
HWY_EXPORT(narrow_bf16);
HWY_EXPORT(narrow_f16);
HWY_EXPORT(narrow_f32);
HWY_EXPORT(narrow_e4m3);
HWY_EXPORT(narrow_e5m2);
HWY_EXPORT(scale);
HWY_EXPORT(scale_by);
HWY_EXPORT(add);
HWY_EXPORT(add_scaled);
HWY_EXPORT(gelu);
HWY_EXPORT(dgelu);
HWY_EXPORT(relu);
HWY_EXPORT(drelu);
HWY_EXPORT(largest_magnitude);

namespace {

// The float32 of a byte with kMantissa bits of mantissa, where no code is special.
template <int kMantissa, int kBias>
constexpr float magnitude_of(unsigned byte) {
  const unsigned exponent = (byte & 0x7f) >> kMantissa;
  const unsigned mantissa = byte & ((1u << kMantissa) - 1);
  if (exponent == 0) {
    return static_cast<float>(mantissa) *
           std::bit_cast<float>((127u - kBias + 1 - kMantissa) << 23);
  }
  return std::bit_cast<float>((exponent + 127u - kBias) << 23 | mantissa << (23 - kMantissa));
}

using ByteTable = std::array<float, 256>;

constexpr float with_sign(float magnitude, unsigned byte) {
  return byte >= 0x80 ? -magnitude : magnitude;
}

constexpr ByteTable e4m3_table() {
  ByteTable table{};
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool nan = (byte & 0x7f) == 0x7f;
    table[byte] =
        nan ? std::bit_cast<float>(0x7fc00000u) : with_sign(magnitude_of<3, 7>(byte), byte);
  }
  return table;
}

constexpr ByteTable e5m2_table() {
  ByteTable table{};
  for (unsigned byte = 0; byte < 256; ++byte) {
    const unsigned magnitude = byte & 0x7f;
    const float infinity = std::bit_cast<float>(0x7f800000u);
    table[byte] = magnitude > 0x7c    ? std::bit_cast<float>(0x7fc00000u)
                  : magnitude == 0x7c ? with_sign(infinity, byte)
                                      : with_sign(magnitude_of<2, 15>(byte), byte);
  }
  return table;
}

constexpr ByteTable kE4m3 = e4m3_table(), kE5m2 = e5m2_table();

void widen_bytes(const ByteTable& table, float* out, const void* in, std::size_t n) {
  const auto* from = static_cast<const std::uint8_t*>(in);
  for (std::size_t i = 0; i < n; ++i) out[i] = table[from[i]];
}

}  // namespace

void widen(DType type, float* out, const void* in, std::size_t n) {
  switch (type) {
    case DType::bf16:
      return HWY_DYNAMIC_DISPATCH(widen_bf16)(out, static_cast<const std::uint16_t*>(in), n);
    case DType::f16:
      return HWY_DYNAMIC_DISPATCH(widen_f16)(out, static_cast<const std::uint16_t*>(in), n);
    case DType::f32:
      if (n > 0) std::memcpy(out, in, n * sizeof(float));
      return;
    case DType::e4m3:
      return widen_bytes(kE4m3, out, in, n);
    case DType::e5m2:
      return widen_bytes(kE5m2, out, in, n);
    default:
      XD_CHECK(!"a type that is not multiplied");
  }
}

void narrow(DType type, void* out, const float* in, std::size_t n) {
  switch (type) {
    case DType::bf16:
      return HWY_DYNAMIC_DISPATCH(narrow_bf16)(static_cast<std::uint16_t*>(out), in, n);
    case DType::f16:
      return HWY_DYNAMIC_DISPATCH(narrow_f16)(static_cast<std::uint16_t*>(out), in, n);
    case DType::f32:
      return HWY_DYNAMIC_DISPATCH(narrow_f32)(static_cast<float*>(out), in, n);
    case DType::e4m3:
      return HWY_DYNAMIC_DISPATCH(narrow_e4m3)(static_cast<std::uint8_t*>(out), in, n);
    case DType::e5m2:
      return HWY_DYNAMIC_DISPATCH(narrow_e5m2)(static_cast<std::uint8_t*>(out), in, n);
    default:
      XD_CHECK(!"a type that no product has");
  }
}

void scale(float* x, float factor, std::size_t n) { HWY_DYNAMIC_DISPATCH(scale)(x, factor, n); }
void scale_by(float* x, const float* factors, std::size_t n) {
  HWY_DYNAMIC_DISPATCH(scale_by)(x, factors, n);
}
void add(float* x, const float* y, std::size_t n) { HWY_DYNAMIC_DISPATCH(add)(x, y, n); }
void add_scaled(float* x, const float* y, float factor, std::size_t n) {
  HWY_DYNAMIC_DISPATCH(add_scaled)(x, y, factor, n);
}
void gelu(float* x, std::size_t n) { HWY_DYNAMIC_DISPATCH(gelu)(x, n); }
void dgelu(float* x, const float* pre_activation, std::size_t n) {
  HWY_DYNAMIC_DISPATCH(dgelu)(x, pre_activation, n);
}
void relu(float* x, std::size_t n) { HWY_DYNAMIC_DISPATCH(relu)(x, n); }
void drelu(float* x, const float* pre_activation, std::size_t n) {
  HWY_DYNAMIC_DISPATCH(drelu)(x, pre_activation, n);
}
std::uint32_t largest_magnitude(const float* x, std::size_t n) {
  return HWY_DYNAMIC_DISPATCH(largest_magnitude)(x, n);
}

}  // namespace xd::gemm::cpu
#endif  // HWY_ONCE
