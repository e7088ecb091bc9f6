// Rows as float8 codes with scales: quantised rows of dispatch, and partial sums of combine under a
// wire. Compile with -ffp-contract=off: a fused multiply-add would change the bits on some targets.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "ep/plan/cpu/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ep/plan/cpu/coded_rows.cc"
#include <hwy/foreach_target.h>
// These headers have to come after foreach_target.h.
#include <hwy/highway.h>

#include "ep/plan/cpu/partials-inl.h"

HWY_BEFORE_NAMESPACE();
namespace xd::rows::HWY_NAMESPACE {

// The smallest block has 16 words.
using BlockPiece = hn::CappedTag<std::uint32_t, 16>;
// Rows without blocks are multiples of 16 bytes.
using Narrow = hn::CappedTag<std::uint32_t, 4>;

// ---- Blocks -------------------------------------------------------------------------------------

// Columns of a row are unpacked by words, as codecs do it: word w has elements even[w] and odd[w].
constexpr std::size_t kColumns = 128;
struct Floats128 {
  HWY_ALIGN float even[kColumns];
  HWY_ALIGN float odd[kColumns];
};

// The elements of words, from where they lie.
template <class C>
struct PayloadWords {
  using Codec = C;
  const std::uint32_t* words;
  template <class D>
  HWY_INLINE void load(D d, std::size_t w, Floats<D>& even, Floats<D>& odd) const {
    Codec::unpack(d, hn::LoadU(d, words + w), even, odd);
  }
};
template <class C>
struct FloatWords {
  using Codec = C;
  const Floats128* floats;
  template <class D>
  HWY_INLINE void load(D, std::size_t w, Floats<D>& even, Floats<D>& odd) const {
    const FloatTag<D> df;
    even = hn::LoadU(df, floats->even + w);
    if constexpr (Codec::kPerWord == 2) odd = hn::LoadU(df, floats->odd + w);
  }
};

// Calls body(tag, w) for words [w, w + lanes) of `words`.
template <class Body>
HWY_INLINE void for_each_piece(std::size_t words, const Body& body) {
  const BlockPiece wide;
  const Narrow narrow;
  std::size_t w = 0;
  for (; w + hn::Lanes(wide) <= words; w += hn::Lanes(wide)) body(wide, w);
  for (; w < words; w += hn::Lanes(narrow)) body(narrow, w);
}

template <class Codec, class D>
HWY_INLINE void keep(D, Floats<D> even, Floats<D> odd, std::size_t w, Floats128& to) {
  const FloatTag<D> df;
  hn::StoreU(even, df, to.even + w);
  if constexpr (Codec::kPerWord == 2) hn::StoreU(odd, df, to.odd + w);
}

// ---- Codes --------------------------------------------------------------------------------------

// Returns |v| as bits, and 0 where v is not finite.
template <class D>
HWY_INLINE Words<D> finite_magnitude(D d, Floats<D> v) {
  const auto magnitude = hn::And(bits(d, v), hn::Set(d, 0x7fffffffu));
  return hn::IfThenElseZero(less(d, magnitude, hn::Set(d, 0x7f800000u)), magnitude);
}

template <class Source>
HWY_INLINE float largest_finite(const Source& source, std::size_t words) {
  const BlockPiece d;
  const hn::RebindToSigned<BlockPiece> di;  // magnitudes are below 2^31, where both orders agree
  auto largest = hn::Zero(di);
  for (std::size_t w = 0; w < words; w += hn::Lanes(d)) {
    auto even = hn::Zero(FloatTag<BlockPiece>()), odd = even;
    source.load(d, w, even, odd);
    largest = hn::Max(largest, hn::BitCast(di, finite_magnitude(d, even)));
    if constexpr (Source::Codec::kPerWord == 2) {
      largest = hn::Max(largest, hn::BitCast(di, finite_magnitude(d, odd)));
    }
  }
  return std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(di, largest)));
}

// The fate of an infinity: dispatch limits it as every large number, combine sends it as a NaN.
enum class Infinity { limited, nan };

// Returns the e4m3fn bits of v * inverse in the low byte of each lane.
template <Infinity kInfinity, class D>
HWY_INLINE Words<D> e4m3_bits(D d, Floats<D> v, float inverse) {
  const auto scaled = bits(d, hn::Mul(v, hn::Set(FloatTag<D>(), inverse)));
  const auto sign = hn::And(hn::ShiftRight<24>(bits(d, v)), hn::Set(d, 0x80u));
  const auto magnitude = hn::And(scaled, hn::Set(d, 0x7fffffffu));
  const auto largest = hn::Set(d, 0x43e00000u);  // 448.0f
  const auto limited = hn::IfThenElse(less(d, magnitude, largest), magnitude, largest);
  const auto rounded = SmallFloat<3, 7>::round(d, limited);
  // A NaN is above infinity as bits.
  const auto most = hn::Set(d, kInfinity == Infinity::nan ? 0x7f7fffffu : 0x7f800000u);
  const auto is_number = hn::Not(less(d, most, hn::And(bits(d, v), hn::Set(d, 0x7fffffffu))));
  return hn::Or(hn::IfThenElse(is_number, rounded, hn::Set(d, 0x7fu)), sign);
}

// Returns the numbers of e4m3fn codes in the low bytes of lanes.
template <class D>
HWY_INLINE Floats<D> e4m3_values(D d, Words<D> codes) {
  const hn::RebindToSigned<D> di;
  const auto magnitude = hn::And(codes, hn::Set(d, 0x7fu));
  const auto normal = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(d, 120u << 23));
  const auto denormal = hn::Mul(hn::ConvertTo(FloatTag<D>(), hn::BitCast(di, magnitude)),
                                hn::Set(FloatTag<D>(), 0x1p-9f));
  const auto number = hn::IfThenElse(less(d, magnitude, hn::Set(d, 8u)), bits(d, denormal), normal);
  const auto value =
      hn::IfThenElse(less(d, magnitude, hn::Set(d, 0x7fu)), number, hn::Set(d, 0x7fc00000u));
  return floats(d, hn::Or(value, hn::ShiftLeft<24>(hn::And(codes, hn::Set(d, 0x80u)))));
}

// Stores the codes of words [w, w + lanes) in the order of their columns, and loads such codes.
template <class Codec, class D>
HWY_INLINE void store_codes(D d, Words<D> even, Words<D> odd, std::size_t w, std::uint8_t* codes) {
  const hn::RebindToSigned<D> di;
  const hn::Rebind<std::uint8_t, D> d8;
  const hn::Rebind<std::uint16_t, D> d16;
  std::uint8_t* const to = codes + w * Codec::kPerWord;
  if constexpr (Codec::kInterleaved) {
    const auto pair = hn::Or(even, hn::ShiftLeft<8>(odd));
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, pair)), d16, reinterpret_cast<std::uint16_t*>(to));
  } else {
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(di, even)), d8, to);
    if constexpr (Codec::kPerWord == 2) {
      hn::StoreU(hn::DemoteTo(d8, hn::BitCast(di, odd)), d8, to + hn::Lanes(d));
    }
  }
}
template <class Codec, class D>
HWY_INLINE void load_codes(D d, const std::uint8_t* codes, std::size_t w, Words<D>& even,
                           Words<D>& odd) {
  const hn::Rebind<std::uint8_t, D> d8;
  const hn::Rebind<std::uint16_t, D> d16;
  const std::uint8_t* const from = codes + w * Codec::kPerWord;
  if constexpr (Codec::kInterleaved) {
    const auto pair =
        hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from)));
    even = hn::And(pair, hn::Set(d, 0xffu));
    odd = hn::ShiftRight<8>(pair);
  } else {
    even = hn::PromoteTo(d, hn::LoadU(d8, from));
    if constexpr (Codec::kPerWord == 2) odd = hn::PromoteTo(d, hn::LoadU(d8, from + hn::Lanes(d)));
  }
}

// The scale of a block, and the scale's reciprocal.
struct BlockScale {
  float scale, inverse;
};

BlockScale quotient_scale(float amax) {
  const float wanted = amax / 448.0f;
  const float scale = amax == 0.0f ? 1.0f : (wanted < 0x1p-126f ? 0x1p-126f : wanted);
  return {scale, 1.0f / scale};
}

// The biased exponent of the smallest power of two that amax / 448 does not exceed, at least
// `bound`. 448 = 1.75 * 2^8, so the addend is chosen such that a mantissa of amax above 1.75
// carries into the exponent.
int power_of(float amax, int bound) {
  const auto up = static_cast<int>((std::bit_cast<std::uint32_t>(amax) + 0x1fffffu) >> 23);
  return up - 8 > bound ? up - 8 : bound;
}

float with_exponent(int biased) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(biased) << 23);
}

BlockScale power_scale(float amax) {
  const int exponent = amax == 0.0f ? 127 : power_of(amax, 1);
  return {with_exponent(exponent), with_exponent(254 - exponent)};
}

// Writes the scale of a block; returns its reciprocal.
float choose_scale(const ep::QuantiseFormat& format, float amax, std::uint8_t* scale) {
  if (format.scale_bytes == 1) {
    const int byte = power_of(amax, 0);
    *scale = static_cast<std::uint8_t>(byte);
    return with_exponent(254 - byte);
  }
  const BlockScale s = format.powers ? power_scale(amax) : quotient_scale(amax);
  std::memcpy(scale, &s.scale, sizeof(float));
  return s.inverse;
}

float read_scale(const ep::QuantiseFormat& format, const std::uint8_t* scale) {
  if (format.scale_bytes == 1) return *scale == 0 ? 0x1p-127f : with_exponent(*scale);
  float value;
  std::memcpy(&value, scale, sizeof(value));
  return value;
}

template <Infinity kInfinity, class Source>
HWY_INLINE void quantise_block(const ep::QuantiseFormat& format, const Source& source,
                               std::uint8_t* codes, std::uint8_t* scale) {
  using Codec = typename Source::Codec;
  const BlockPiece d;
  const std::size_t words = format.block / Codec::kPerWord;
  const float inverse = choose_scale(format, largest_finite(source, words), scale);
  for (std::size_t w = 0; w < words; w += hn::Lanes(d)) {
    auto even = hn::Zero(FloatTag<BlockPiece>()), odd = even;
    source.load(d, w, even, odd);
    store_codes<Codec>(d, e4m3_bits<kInfinity>(d, even, inverse),
                       e4m3_bits<kInfinity>(d, odd, inverse), w, codes);
  }
}

template <class Codec>
HWY_INLINE void decode_block(const ep::QuantiseFormat& format, const std::uint8_t* codes,
                             const std::uint8_t* scale, Floats128& to) {
  const BlockPiece d;
  const auto factor = hn::Set(FloatTag<BlockPiece>(), read_scale(format, scale));
  for (std::size_t w = 0; w < format.block / Codec::kPerWord; w += hn::Lanes(d)) {
    auto even = hn::Zero(d), odd = even;
    load_codes<Codec>(d, codes, w, even, odd);
    keep<Codec>(d, hn::Mul(e4m3_values(d, even), factor), hn::Mul(e4m3_values(d, odd), factor), w,
                to);
  }
}

void quantise(const ep::QuantiseFormat& format, void* out, void* scales, const void* row,
              std::size_t n) {
  auto* codes = static_cast<std::uint8_t*>(out);
  auto* scale = static_cast<std::uint8_t*>(scales);
  PayloadWords<Bf16> block{static_cast<const std::uint32_t*>(row)};
  for (std::size_t done = 0; done < n; done += format.block) {
    quantise_block<Infinity::limited>(format, block, codes, scale);
    codes += format.block;
    scale += format.scale_bytes;
    block.words += format.block / Bf16::kPerWord;
  }
}

// ---- Sums under a wire --------------------------------------------------------------------------

// Words of a row from `at` on, at most a block.
struct Cut {
  std::size_t at, words;
};

// Float32 numbers of a row in the order of its columns.
template <class Codec>
void store_floats(const Floats128& from, std::size_t words, float* to) {
  for_each_piece(words, [&](auto d, std::size_t w) HWY_ATTR {
    using D = decltype(d);
    const FloatTag<D> df;
    auto even = hn::Zero(df), odd = even;
    FloatWords<Codec>{&from}.load(d, w, even, odd);
    float* const at = to + w * Codec::kPerWord;
    if constexpr (Codec::kInterleaved) {
      hn::StoreInterleaved2(even, odd, df, at);
    } else {
      hn::StoreU(even, df, at);
      if constexpr (Codec::kPerWord == 2) hn::StoreU(odd, df, at + hn::Lanes(d));
    }
  });
}
template <class Codec>
void load_floats(const float* from, std::size_t words, Floats128& to) {
  for_each_piece(words, [&](auto d, std::size_t w) HWY_ATTR {
    using D = decltype(d);
    const FloatTag<D> df;
    auto even = hn::Zero(df), odd = even;
    const float* const at = from + w * Codec::kPerWord;
    if constexpr (Codec::kInterleaved) {
      hn::LoadInterleaved2(df, at, even, odd);
    } else {
      even = hn::LoadU(df, at);
      if constexpr (Codec::kPerWord == 2) odd = hn::LoadU(df, at + hn::Lanes(d));
    }
    keep<Codec>(d, even, odd, w, to);
  });
}

template <class Codec, bool kWeighted>
void add_rows(const Terms& terms, int begin, int end, const Cut& cut, Floats128& to) {
  for_each_piece(cut.words, [&](auto d, std::size_t w) HWY_ATTR {
    auto even = hn::Zero(FloatTag<decltype(d)>()), odd = even;
    sum_partial<Codec, kWeighted>(d, terms, begin, end, cut.at + w, even, odd);
    keep<Codec>(d, even, odd, w, to);
  });
}

// The place of a cut's codes and scale in a row that has both.
struct CodePlace {
  std::size_t codes, scale;

  static CodePlace of(const ep::QuantiseFormat& format, std::size_t column, std::size_t n) {
    return {column, n + column / format.block * format.scale_bytes};
  }
};

// Brings a partial sum's part of the cut, as the source adds it.
template <class Codec>
void read_partial(const ep::WireFormat& wire, const WireTerms& terms, int partial, const Cut& cut,
                  std::size_t n, Floats128& to) {
  const Terms& sum = terms.sum;
  const int begin = partial == 0 ? 0 : sum.partial_ends[partial - 1];
  const auto* const row = static_cast<const std::uint8_t*>(sum.rows[begin]);
  const std::size_t column = cut.at * Codec::kPerWord;
  const CodePlace place = wire.codes ? CodePlace::of(wire.codes, column, n) : CodePlace{};
  switch (terms.forms[partial]) {
    case PartialForm::wire:
      if (wire.is_float()) {
        load_floats<Codec>(reinterpret_cast<const float*>(row) + column, cut.words, to);
      } else {
        decode_block<Codec>(wire.codes, row + place.codes, row + place.scale, to);
      }
      return;
    case PartialForm::payload:
      for_each_piece(cut.words, [&](auto d, std::size_t w) HWY_ATTR {
        auto even = hn::Zero(FloatTag<decltype(d)>()), odd = even;
        Codec::unpack(d, hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(row) + cut.at + w),
                      even, odd);
        keep<Codec>(d, even, odd, w, to);
      });
      return;
    case PartialForm::rows:
      break;
  }
  const int end = sum.partial_ends[partial];
  sum.weights != nullptr ? add_rows<Codec, true>(sum, begin, end, cut, to)
                         : add_rows<Codec, false>(sum, begin, end, cut, to);
  if (!wire.codes) return;
  std::uint8_t codes[kColumns], scale[sizeof(float)];
  quantise_block<Infinity::nan>(wire.codes, FloatWords<Codec>{&to}, codes, scale);
  decode_block<Codec>(wire.codes, codes, scale, to);
}

template <class Codec>
void add_to(Floats128& sum, const Floats128& term, std::size_t words) {
  for_each_piece(words, [&](auto d, std::size_t w) HWY_ATTR {
    auto even = hn::Zero(FloatTag<decltype(d)>()), odd = even, more_even = even, more_odd = even;
    FloatWords<Codec>{&sum}.load(d, w, even, odd);
    FloatWords<Codec>{&term}.load(d, w, more_even, more_odd);
    keep<Codec>(d, hn::Add(even, more_even), hn::Add(odd, more_odd), w, sum);
  });
}

template <class Codec>
void round_all(Floats128& sum, std::size_t words) {
  for_each_piece(words, [&](auto d, std::size_t w) HWY_ATTR {
    auto even = hn::Zero(FloatTag<decltype(d)>()), odd = even;
    FloatWords<Codec>{&sum}.load(d, w, even, odd);
    keep<Codec>(d, Codec::round(d, even), Codec::round(d, odd), w, sum);
  });
}

// Adds partials [begin, end).
template <class Codec>
void add_partials(const ep::WireFormat& wire, const WireTerms& terms, int begin, int end,
                  const Cut& cut, std::size_t n, Floats128& to) {
  read_partial<Codec>(wire, terms, begin, cut, n, to);
  for (int p = begin + 1; p < end; ++p) {
    Floats128 term;
    read_partial<Codec>(wire, terms, p, cut, n, term);
    add_to<Codec>(to, term, cut.words);
  }
}

// The sum in float32.
template <class Codec>
void sum_cut(const ep::WireFormat& wire, const WireTerms& terms, const Cut& cut, std::size_t n,
             Floats128& to) {
  const Terms& sum = terms.sum;
  if (sum.host_ends == nullptr || sum.num_hosts == 1) {
    return add_partials<Codec>(wire, terms, 0, sum.num_partials, cut, n, to);
  }
  for (int host = 0; host < sum.num_hosts; ++host) {
    Floats128 of_host;
    Floats128& into = host == 0 ? to : of_host;
    add_partials<Codec>(wire, terms, host == 0 ? 0 : sum.host_ends[host - 1], sum.host_ends[host],
                        cut, n, into);
    if (!wire.is_float()) round_all<Codec>(into, cut.words);
    if (host > 0) add_to<Codec>(to, of_host, cut.words);
  }
}

// Calls body(cut) for blocks of columns one behind the other.
template <class Codec, class Body>
void for_each_cut(std::size_t n, const Body& body) {
  constexpr std::size_t kMost = kColumns / Codec::kPerWord;
  const std::size_t words = n / Codec::kPerWord;
  for (std::size_t at = 0; at < words; at += kMost) body(Cut{at, std::min(kMost, words - at)});
}

template <class Codec>
void sum_wire_as(const ep::WireFormat& wire, void* out, const WireTerms& terms, std::size_t n) {
  auto* const to = static_cast<std::uint32_t*>(out);
  for_each_cut<Codec>(n, [&](const Cut& cut) HWY_ATTR {
    Floats128 sum;
    sum_cut<Codec>(wire, terms, cut, n, sum);
    for_each_piece(cut.words, [&](auto d, std::size_t w) HWY_ATTR {
      auto even = hn::Zero(FloatTag<decltype(d)>()), odd = even;
      FloatWords<Codec>{&sum}.load(d, w, even, odd);
      even = with_canonical_nan(d, even);
      odd = with_canonical_nan(d, odd);
      hn::StoreU(Codec::pack(d, even, odd), d, to + cut.at + w);
    });
  });
}

template <class Codec>
void encode_wire_as(const ep::WireFormat& wire, void* out, const WireTerms& terms, std::size_t n) {
  if (terms.sum.num_partials == 1 && terms.forms[0] == PartialForm::wire) {
    std::memcpy(out, terms.sum.rows[0], wire.row_bytes(n, 0));
    return;
  }
  auto* const bytes = static_cast<std::uint8_t*>(out);
  for_each_cut<Codec>(n, [&](const Cut& cut) HWY_ATTR {
    const std::size_t column = cut.at * Codec::kPerWord;
    Floats128 sum;
    if (wire.is_float()) {
      sum_cut<Codec>(wire, terms, cut, n, sum);
      return store_floats<Codec>(sum, cut.words, static_cast<float*>(out) + column);
    }
    const Terms& rows = terms.sum;
    rows.weights != nullptr ? add_rows<Codec, true>(rows, 0, rows.partial_ends[0], cut, sum)
                            : add_rows<Codec, false>(rows, 0, rows.partial_ends[0], cut, sum);
    const CodePlace place = CodePlace::of(wire.codes, column, n);
    quantise_block<Infinity::nan>(wire.codes, FloatWords<Codec>{&sum}, bytes + place.codes,
                                  bytes + place.scale);
  });
}

void sum_wire_of(Type type, const ep::WireFormat& wire, void* out, const WireTerms& terms,
                 std::size_t n) {
  switch (type) {
    case Type::bf16:
      return sum_wire_as<Bf16>(wire, out, terms, n);
    case Type::f16:
      return sum_wire_as<F16>(wire, out, terms, n);
    case Type::f32:
      return sum_wire_as<F32>(wire, out, terms, n);
  }
}

void encode_wire_of(Type type, const ep::WireFormat& wire, void* out, const WireTerms& terms,
                    std::size_t n) {
  switch (type) {
    case Type::bf16:
      return encode_wire_as<Bf16>(wire, out, terms, n);
    case Type::f16:
      return encode_wire_as<F16>(wire, out, terms, n);
    case Type::f32:
      return encode_wire_as<F32>(wire, out, terms, n);
  }
}

}  // namespace xd::rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace xd::rows {

HWY_EXPORT(quantise);
HWY_EXPORT(sum_wire_of);
HWY_EXPORT(encode_wire_of);

void quantise_e4m3(const ep::QuantiseFormat& format, void* out, void* scales, const void* bf16_row,
                   std::size_t n) {
  HWY_DYNAMIC_DISPATCH(quantise)(format, out, scales, bf16_row, n);
}

void sum_wire(Type type, const ep::WireFormat& wire, void* out, const WireTerms& terms,
              std::size_t n) {
  HWY_DYNAMIC_DISPATCH(sum_wire_of)(type, wire, out, terms, n);
}

void encode_wire(Type type, const ep::WireFormat& wire, void* out, const WireTerms& terms,
                 std::size_t n) {
  HWY_DYNAMIC_DISPATCH(encode_wire_of)(type, wire, out, terms, n);
}

}  // namespace xd::rows
#endif  // HWY_ONCE
