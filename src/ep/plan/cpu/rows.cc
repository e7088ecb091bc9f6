// Compile with -ffp-contract=off: a fused multiply-add would change the bits on some targets.
#include "ep/plan/cpu/rows.h"

#include <bit>
#include <cstdint>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ep/plan/cpu/rows.cc"
#include <hwy/foreach_target.h>
// These headers have to come after foreach_target.h.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "ep/plan/cpu/partials-inl.h"

HWY_BEFORE_NAMESPACE();
namespace xd::rows::HWY_NAMESPACE {

// Lanes of 16 bytes: every row is a multiple of them.
using Narrow = hn::CappedTag<std::uint32_t, 4>;
using Wide = hn::ScalableTag<std::uint32_t>;

template <class D>
HWY_INLINE void put(D d, Words<D> words, std::uint32_t* to, Store store) {
  if (store == Store::streaming) {
    hn::Stream(words, d, to);
  } else {
    hn::StoreU(words, d, to);
  }
}

// Calls body(tag, i) for words [i, i + lanes) of an output, with wide tags where possible. When
// streaming, a wide piece starts at a multiple of its size, as streaming stores must.
template <class Body>
HWY_INLINE void for_each_piece(const std::uint32_t* out, std::size_t words, Store store,
                               const Body& body) {
  const Narrow narrow;
  const Wide wide;
  const std::size_t step = hn::Lanes(wide);
  std::size_t i = 0;
  if (store == Store::streaming) {
    const std::size_t bytes = step * sizeof(std::uint32_t);
    const auto misaligned = [&](std::size_t at) {
      return reinterpret_cast<std::uintptr_t>(out + at) % bytes != 0;
    };
    for (; i < words && misaligned(i); i += hn::Lanes(narrow)) body(narrow, i);
  }
  for (; i + step <= words; i += step) body(wide, i);
  for (; i < words; i += hn::Lanes(narrow)) body(narrow, i);
}

// dst is 16-byte aligned, and bytes a multiple of 16. The function is not inlined, because GCC 12
// would warn about loads behind a short source, which the loop does not make.
HWY_NOINLINE void stream_copy(void* dst, const void* src, std::size_t bytes) {
  auto* const to = static_cast<std::uint32_t*>(dst);
  const auto* const from = static_cast<const std::uint32_t*>(src);
  const auto copy_piece = [=](auto d, std::size_t i)
                              HWY_ATTR { hn::Stream(hn::LoadU(d, from + i), d, to + i); };
  for_each_piece(to, bytes / sizeof(*to), Store::streaming, copy_piece);
}

void stream_zero(void* dst, std::size_t bytes) {
  auto* const to = static_cast<std::uint32_t*>(dst);
  const auto zero_piece = [=](auto d, std::size_t i)
                              HWY_ATTR { hn::Stream(hn::Zero(d), d, to + i); };
  for_each_piece(to, bytes / sizeof(*to), Store::streaming, zero_piece);
}

// ---- sum --------------------------------------------------------------------------------------

// Adds the numbers of `count` parts, each rounded; load(part, even, odd) brings one part's. The
// result is not rounded.
template <class Codec, class D, class Load>
HWY_INLINE void sum_rounded(D d, int count, Floats<D>& even, Floats<D>& odd, const Load& load) {
  load(0, even, odd);
  if (count > 1) {
    even = Codec::round(d, even);
    if constexpr (Codec::kPerWord == 2) odd = Codec::round(d, odd);
  }
  for (int part = 1; part < count; ++part) {
    auto next_even = even, next_odd = odd;
    load(part, next_even, next_odd);
    even = hn::Add(even, Codec::round(d, next_even));
    if constexpr (Codec::kPerWord == 2) odd = hn::Add(odd, Codec::round(d, next_odd));
  }
}

// Likewise for partials [begin, end).
template <class Codec, bool kWeighted, class D>
HWY_INLINE void sum_partials(D d, const Terms& terms, int begin, int end, std::size_t at,
                             Floats<D>& even, Floats<D>& odd) {
  const auto load = [&](int part, Floats<D>& to_even, Floats<D>& to_odd) HWY_ATTR {
    const int p = begin + part;
    sum_partial<Codec, kWeighted>(d, terms, p == 0 ? 0 : terms.partial_ends[p - 1],
                                  terms.partial_ends[p], at, to_even, to_odd);
  };
  sum_rounded<Codec>(d, end - begin, even, odd, load);
}

// Computes words [at, at + lanes) of the sum.
template <class Codec, bool kWeighted, bool kByHost, class D>
HWY_INLINE Words<D> sum_piece(D d, const Terms& terms, std::size_t at) {
  auto even = hn::Zero(FloatTag<D>()), odd = even;
  if constexpr (kByHost) {
    const auto load = [&](int host, Floats<D>& to_even, Floats<D>& to_odd) HWY_ATTR {
      sum_partials<Codec, kWeighted>(d, terms, host == 0 ? 0 : terms.host_ends[host - 1],
                                     terms.host_ends[host], at, to_even, to_odd);
    };
    sum_rounded<Codec>(d, terms.num_hosts, even, odd, load);
  } else {
    sum_partials<Codec, kWeighted>(d, terms, 0, terms.num_partials, at, even, odd);
  }
  if (kWeighted || terms.partial_ends[terms.num_partials - 1] > 1) {
    even = with_canonical_nan(d, even);
    if constexpr (Codec::kPerWord == 2) odd = with_canonical_nan(d, odd);
  }
  return Codec::pack(d, even, odd);
}

template <class Codec, bool kWeighted, bool kByHost>
HWY_INLINE void sum_pieces(void* out, const Terms& terms, std::size_t n, Store store) {
  auto* const to = static_cast<std::uint32_t*>(out);
  const auto put_piece = [&](auto d, std::size_t i) HWY_ATTR {
    for (const void* next : terms.next_rows) {
      hwy::Prefetch(static_cast<const std::uint32_t*>(next) + i);
    }
    put(d, sum_piece<Codec, kWeighted, kByHost>(d, terms, i), to + i, store);
  };
  for_each_piece(to, n / Codec::kPerWord, store, put_piece);
}

template <class Codec>
void sum_as(void* out, const Terms& terms, std::size_t n, Store store) {
  const bool weighted = terms.weights != nullptr;
  if (terms.host_ends == nullptr) {
    weighted ? sum_pieces<Codec, true, false>(out, terms, n, store)
             : sum_pieces<Codec, false, false>(out, terms, n, store);
  } else {
    weighted ? sum_pieces<Codec, true, true>(out, terms, n, store)
             : sum_pieces<Codec, false, true>(out, terms, n, store);
  }
}

void sum_bf16(void* out, const Terms& t, std::size_t n, Store s) { sum_as<Bf16>(out, t, n, s); }
void sum_f16(void* out, const Terms& t, std::size_t n, Store s) { sum_as<F16>(out, t, n, s); }
void sum_f32(void* out, const Terms& t, std::size_t n, Store s) { sum_as<F32>(out, t, n, s); }

// ---- dot --------------------------------------------------------------------------------------

using Sums = hn::CappedTag<std::uint32_t, 8>;

// Adds the products of 16 elements. Where a codec interleaves, sums[0, 8) belong to the even
// elements and sums[8, 16) to the odd ones. Otherwise sums[i] belongs to element i.
template <class Codec>
HWY_INLINE void add_products(const std::uint32_t* a, const std::uint32_t* b, float* sums) {
  const Sums d;
  const FloatTag<Sums> df;
  for (std::size_t w = 0; w < 16 / Codec::kPerWord; w += hn::Lanes(d)) {
    auto a_even = hn::Zero(df), a_odd = a_even, b_even = a_even, b_odd = a_even;
    Codec::unpack(d, hn::LoadU(d, a + w), a_even, a_odd);
    Codec::unpack(d, hn::LoadU(d, b + w), b_even, b_odd);
    hn::Store(hn::Add(hn::Load(df, sums + w), hn::Mul(a_even, b_even)), df, sums + w);
    if constexpr (Codec::kPerWord == 2) {
      hn::Store(hn::Add(hn::Load(df, sums + 8 + w), hn::Mul(a_odd, b_odd)), df, sums + 8 + w);
    }
  }
}

template <class Codec>
float dot_as(const void* a, const void* b, std::size_t n) {
  constexpr std::size_t kBlock = 16 / Codec::kPerWord;  // words of 16 elements
  const auto* const a_words = static_cast<const std::uint32_t*>(a);
  const auto* const b_words = static_cast<const std::uint32_t*>(b);
  HWY_ALIGN float sums[16] = {};
  const std::size_t words = n / Codec::kPerWord;
  std::size_t at = 0;
  for (; at + kBlock <= words; at += kBlock) {
    add_products<Codec>(a_words + at, b_words + at, sums);
  }
  if (at < words) {
    // The tails are filled up with zeros. Adding +0 changes no sum, since none of the sums can be
    // -0.
    std::uint32_t a_tail[kBlock] = {}, b_tail[kBlock] = {};
    std::memcpy(a_tail, a_words + at, (words - at) * sizeof(*a_tail));
    std::memcpy(b_tail, b_words + at, (words - at) * sizeof(*b_tail));
    add_products<Codec>(a_tail, b_tail, sums);
  }
  float in_order[16];
  for (std::size_t i = 0; i < 16; ++i) {
    in_order[i] = Codec::kInterleaved ? sums[i / 2 + i % 2 * 8] : sums[i];
  }
  for (std::size_t half = 8; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) in_order[j] += in_order[j + half];
  }
  return in_order[0] == in_order[0] ? in_order[0] : std::bit_cast<float>(0x7fc00000u);
}

float dot_bf16(const void* a, const void* b, std::size_t n) { return dot_as<Bf16>(a, b, n); }
float dot_f16(const void* a, const void* b, std::size_t n) { return dot_as<F16>(a, b, n); }
float dot_f32(const void* a, const void* b, std::size_t n) { return dot_as<F32>(a, b, n); }

}  // namespace xd::rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace xd::rows {

HWY_EXPORT(stream_copy);
HWY_EXPORT(stream_zero);
HWY_EXPORT(sum_bf16);
HWY_EXPORT(sum_f16);
HWY_EXPORT(sum_f32);
HWY_EXPORT(dot_bf16);
HWY_EXPORT(dot_f16);
HWY_EXPORT(dot_f32);

namespace {

// The number of bytes to the next multiple of 16, where streaming can begin.
std::size_t bytes_to_boundary(const void* p, std::size_t bytes) {
  const std::size_t to_boundary = (16 - reinterpret_cast<std::uintptr_t>(p) % 16) % 16;
  return to_boundary < bytes ? to_boundary : bytes;
}

}  // namespace

void copy(void* dst, const void* src, std::size_t bytes, Store store) {
  if (bytes == 0) return;
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  if (store == Store::streaming) {
    const std::size_t head = bytes_to_boundary(to, bytes);
    const std::size_t middle = (bytes - head) / 16 * 16;
    std::memcpy(to, from, head);
    HWY_DYNAMIC_DISPATCH(stream_copy)(to + head, from + head, middle);
    to += head + middle;
    from += head + middle;
    bytes -= head + middle;
  }
  std::memcpy(to, from, bytes);
}

void copy_to_many(void* const* dsts, int count, const void* src, std::size_t bytes, Store store) {
  // A piece stays in the first-level cache while it is written to every destination.
  constexpr std::size_t kPiece = 8192;
  for (std::size_t at = 0; at < bytes; at += kPiece) {
    const std::size_t piece = bytes - at < kPiece ? bytes - at : kPiece;
    for (int i = 0; i < count; ++i) {
      copy(static_cast<std::byte*>(dsts[i]) + at, static_cast<const std::byte*>(src) + at, piece,
           store);
    }
  }
}

void zero(void* dst, std::size_t bytes, Store store) {
  if (bytes == 0) return;
  auto* to = static_cast<std::byte*>(dst);
  if (store == Store::streaming) {
    const std::size_t head = bytes_to_boundary(to, bytes);
    const std::size_t middle = (bytes - head) / 16 * 16;
    std::memset(to, 0, head);
    HWY_DYNAMIC_DISPATCH(stream_zero)(to + head, middle);
    to += head + middle;
    bytes -= head + middle;
  }
  std::memset(to, 0, bytes);
}

void flush() { hwy::FlushStream(); }

void sum(Type type, void* out, const Terms& terms, std::size_t n, Store store) {
  switch (type) {
    case Type::bf16:
      return HWY_DYNAMIC_DISPATCH(sum_bf16)(out, terms, n, store);
    case Type::f16:
      return HWY_DYNAMIC_DISPATCH(sum_f16)(out, terms, n, store);
    case Type::f32:
      return HWY_DYNAMIC_DISPATCH(sum_f32)(out, terms, n, store);
  }
}

void scale(Type type, void* out, const void* row, float weight, std::size_t n, Store store) {
  const int end = 1;
  sum(type, out, {.rows = &row, .weights = &weight, .partial_ends = &end, .num_partials = 1}, n,
      store);
}

float dot(Type type, const void* a, const void* b, std::size_t n) {
  switch (type) {
    case Type::bf16:
      return HWY_DYNAMIC_DISPATCH(dot_bf16)(a, b, n);
    case Type::f16:
      return HWY_DYNAMIC_DISPATCH(dot_f16)(a, b, n);
    case Type::f32:
      return HWY_DYNAMIC_DISPATCH(dot_f32)(a, b, n);
  }
  return 0.0f;
}

}  // namespace xd::rows
#endif  // HWY_ONCE
