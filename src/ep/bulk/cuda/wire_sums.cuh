// Partial sums of combine under a wire (xd_ep_wire): how a warp makes them out of its rows, and
// adds them up. A cell is a row of float32, or codes with their scales behind them, or a row of the
// payload type, where that has all that float32 has. Blocks of columns lie as vectors of rows do
// (TermRing): a lane has vector j of a piece, and its neighbours the rest of the block.
#pragma once

#include "ep/bulk/cuda/hosts.cuh"
#include "ep/plan/cuda/codes.cuh"
#include "ep/plan/cuda/sums.cuh"

namespace xd::ep::cuda {

// A lane's numbers of a piece.
template <class T>
using PieceSum = float[TermPieces::kVectors][T::kPerVector];

template <class T>
struct CodePiece {
  static constexpr int kVectors = TermPieces::kVectors;
  static constexpr std::uint32_t kColumns = TermPieces::kColumns * T::kPerVector;
  static constexpr std::uint32_t kBlocks = kColumns / kCodeBlock;
  static constexpr std::uint32_t kLanes = kCodeBlock / T::kPerVector;  // lanes with a block
  using Vector = Codes<T::kPerVector>;

  // The block of this lane's vector j, among the piece's.
  __device__ static std::uint32_t block_of(std::uint32_t j) {
    return j * (32 / kLanes) + lane_id() / kLanes;
  }
};

// Of the largest magnitudes in the vectors of each lane, those in whole blocks: a lane gets that of
// its vector lane % 4. Each step brings lanes together that share a block, the first two also
// vectors.
template <class T>
__device__ float largest_of_block(const float (&most)[TermPieces::kVectors]) {
  static_assert(TermPieces::kVectors == 4);
  const bool odd = (lane_id() & 1) != 0, upper = (lane_id() & 2) != 0;
  const auto meet = [](bool second, float a, float b, int step) {
    return fmaxf(second ? b : a, __shfl_xor_sync(kAllLanes, second ? a : b, step));
  };
  float largest = meet(upper, meet(odd, most[0], most[1], 1), meet(odd, most[2], most[3], 1), 2);
#pragma unroll
  for (int step = 4; step < static_cast<int>(CodePiece<T>::kLanes); step *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  return largest;
}

// Puts a piece into codes, whose vector j at(j, x) gives. Returns the scale of the block of vector
// lane % 4. All lanes call it.
template <class T, class At>
__device__ float encode_piece(const At& at, const QuantiseFormat& format,
                              typename CodePiece<T>::Vector (&codes)[TermPieces::kVectors]) {
  bool finite = true;
  const auto largest = [&] {
    float most[TermPieces::kVectors];
#pragma unroll
    for (int j = 0; j < TermPieces::kVectors; ++j) {
      float x[T::kPerVector];
      at(j, x);
      if (!finite) make_infinities_nan(x);
      most[j] = largest_of(x);
    }
    return largest_of_block<T>(most);
  };
  float most = largest();
  finite = !__any_sync(kAllLanes, is_infinite(most));
  if (!finite) most = largest();
  const CodeScale own = code_scale(most, format);
#pragma unroll
  for (int j = 0; j < TermPieces::kVectors; ++j) {
    float x[T::kPerVector];
    at(j, x);
    if (!finite) make_infinities_nan(x);
    codes[j] = codes_of(x, __shfl_sync(kAllLanes, own.inverse, j, TermPieces::kVectors));
  }
  return own.scale;
}

// The terms of a sum on their way, as TermRing has them: rows of codes, and some rows of this rank
// as they are, which have no cell. A lane reads codes and scales that others have copied.
template <class T>
class CodeRing : TermPieces {
  using Piece = CodePiece<T>;

 public:
  // A term of weight 1 is a row, and others are codes. `columns`: of a row.
  __device__ CodeRing(std::byte* shared, const WarpTerms& terms, int count,
                      const QuantiseFormat& format, std::uint32_t columns, std::uint32_t first,
                      std::uint32_t last)
      : shared_(shared),
        terms_(terms),
        count_(count),
        format_(format),
        columns_(columns),
        at_(first),
        last_(last) {
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) load_next();
  }

  // Calls body(j, numbers) with vector j of the next term, which is term `r`, as the source adds
  // it. Numbers behind the last block have any value. All lanes call it.
  template <class Body>
  __device__ void take(int r, Body&& body) {
    ptx::copy_async_wait<kAhead - 1>();
    __syncwarp();  // all lanes' copies are here
    const std::byte* const place = shared_ + place_;
    typename Piece::Vector codes[kVectors];
    float scale[kVectors];
    if (is_row(r)) {
      uint4 v[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        v[j] = *reinterpret_cast<const uint4*>(place + (lane_id() + j * 32) * 16);
      }
      const auto at = [&](int j, float(&x)[T::kPerVector]) { T::unpack(v[j], x); };
      const float own = encode_piece<T>(at, format_, codes);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) scale[j] = __shfl_sync(kAllLanes, own, j, kVectors);
    } else {
      const auto* const scales = reinterpret_cast<const float*>(place + Piece::kColumns);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const std::byte* const from = place + (lane_id() + j * 32) * T::kPerVector;
        codes[j] = *reinterpret_cast<const typename Piece::Vector*>(from);
        scale[j] = scales[Piece::block_of(j)];
      }
    }
    __syncwarp();  // all lanes have read the place
    load_next();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float x[T::kPerVector];
      numbers_of(codes[j], scale[j], x);
      body(j, x);
    }
  }

 private:
  static constexpr std::uint32_t kScaleVectors = Piece::kBlocks * sizeof(float) / 16;
  static_assert(Piece::kColumns + kScaleVectors * 16 <= kColumns * 16);

  __device__ bool is_row(int term) const { return terms_.weight[term] != 0.0f; }

  // Fills the place that has just been read. There is a group for each place, also behind the end.
  __device__ void load_next() {
    if (at_ < last_) {
      is_row(term_) ? load_row() : load_codes();
    }
    ptx::copy_async_commit();
    place_ = place_ + kColumns * 16 < kBytes ? place_ + kColumns * 16 : 0;
    if (++term_ < count_) return;
    term_ = 0;
    at_ += kColumns;
  }
  __device__ void load_row() {
    const std::uint32_t own = at_ + lane_id();
    const std::byte* from = terms_.row[term_] + std::uint64_t{own} * 16;
    std::byte* const to = shared_ + place_ + lane_id() * 16;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (own + j * 32 < last_) ptx::copy_async(to + j * 512, from + j * 512);
    }
  }
  __device__ void load_codes() {
    const std::byte* const row = terms_.row[term_];
    const std::uint32_t column = at_ * T::kPerVector, end = last_ * T::kPerVector;
    const std::uint32_t own = lane_id() * 16;
    std::byte* const to = shared_ + place_ + own;
#pragma unroll
    for (std::uint32_t c = 0; c < Piece::kColumns; c += 512) {
      if (column + c + own < end) ptx::copy_async(to + c, row + column + c + own);
    }
    // Four scales a lane.
    if (lane_id() < kScaleVectors && column + lane_id() * 4 * kCodeBlock < end) {
      const std::uint64_t scales = columns_ + column / kCodeBlock * sizeof(float);
      ptx::copy_async(to + Piece::kColumns, row + scales + own);
    }
  }

  std::byte* const shared_;
  const WarpTerms& terms_;
  const int count_;
  const QuantiseFormat format_;
  const std::uint32_t columns_;
  int term_ = 0;             // the next term to load,
  std::uint32_t at_;         // the first vector of its row,
  std::uint32_t place_ = 0;  // and where it goes, and where the oldest lies, as a byte offset
  const std::uint32_t last_;
};

// Rows of numbers of type `In`, whose vectors are those of the ring.
template <class In>
class NumberRing {
 public:
  __device__ NumberRing(std::byte* shared, const WarpTerms& terms, int count, std::uint32_t first,
                        std::uint32_t last)
      : ring_(shared, terms, count, first, last) {}
  template <class Body>
  __device__ void take(int, Body&& body) {
    uint4 v[TermPieces::kVectors];
    ring_.take(v);
#pragma unroll
    for (int j = 0; j < TermPieces::kVectors; ++j) {
      float x[In::kPerVector];
      In::unpack(v[j], x);
      body(j, x);
    }
  }

 private:
  TermRing ring_;
};

// Rounds a vector of numbers of the type `In` to the payload type T: the first bytes of the result.
template <class T, class In>
__device__ uint4 round_vector(const float (&x)[In::kPerVector]) {
  static_assert(In::kPerVector <= T::kPerVector);
  float all[T::kPerVector];
#pragma unroll
  for (int n = 0; n < T::kPerVector; ++n) all[n] = n < In::kPerVector ? x[n] : 0.0f;
  return pack<T>(all);
}

// Adds the next term, which is term `r`, to `sum`; or starts it.
template <class In, bool kStarts, class Ring>
__device__ void add_next(Ring& coming, int r, PieceSum<In>& sum) {
  coming.take(r, [&](int j, const float(&x)[In::kPerVector]) {
#pragma unroll
    for (int n = 0; n < In::kPerVector; ++n) {
      sum[j][n] = kStarts ? x[n] : __fadd_rn(sum[j][n], x[n]);
    }
  });
}

// Writes a piece of a sum in the payload type T. Its vectors are those of the type `In`.
template <class T, class In>
__device__ void put_piece(std::byte* out, const PieceSum<In>& sum, std::uint32_t first,
                          std::uint32_t last) {
#pragma unroll
  for (int j = 0; j < TermPieces::kVectors; ++j) {
    const std::uint32_t v = first + lane_id() + j * 32;
    if (v >= last) continue;
    const uint4 y = round_vector<T, In>(sum[j]);
    if constexpr (In::kPerVector == T::kPerVector) {
      ptx::st_streaming(out + std::uint64_t{v} * 16, y);
    } else {
      ptx::st_streaming(out + std::uint64_t{v} * 8, make_uint2(y.x, y.y));
    }
  }
}

// Writes the sum of `count` terms, at least one, over their vectors [first, last).
template <class T, class In, class Ring>
__device__ void sum_wire(std::byte* out, Ring& coming, int count, std::uint32_t first,
                         std::uint32_t last) {
#pragma unroll 1
  for (; first < last; first += TermPieces::kColumns) {
    PieceSum<In> sum;
    add_next<In, true>(coming, 0, sum);
#pragma unroll 1
    for (int r = 1; r < count; ++r) add_next<In, false>(coming, r, sum);
    put_piece<T, In>(out, sum, first, last);
  }
}

// The same by host. `ends`: the terms that are the last of a host, as bits. A host's sum is rounded
// before it is added to the others' if `rounds`.
template <class T, class In, class Ring>
__device__ void sum_wire_by_host(std::byte* out, Ring& coming, int count, unsigned ends,
                                 bool rounds, std::uint32_t first, std::uint32_t last) {
  constexpr int kVectors = TermPieces::kVectors;
  const auto clear = [](PieceSum<In>& sum) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int n = 0; n < In::kPerVector; ++n) sum[j][n] = -0.0f;
    }
  };
  const auto add = [&](PieceSum<In>& total, const PieceSum<In>& of_host) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float all[T::kPerVector];
      T::unpack(round_vector<T, In>(of_host[j]), all);
#pragma unroll
      for (int n = 0; n < In::kPerVector; ++n) {
        total[j][n] = __fadd_rn(total[j][n], rounds ? all[n] : of_host[j][n]);
      }
    }
  };
#pragma unroll 1
  for (; first < last; first += TermPieces::kColumns) {
    PieceSum<In> total, of_host;
    clear(total);
    clear(of_host);
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      add_next<In, false>(coming, r, of_host);
      if ((ends >> r & 1) == 0) continue;
      add(total, of_host);
      clear(of_host);
    }
    put_piece<T, In>(out, total, first, last);
  }
}

// Calls body(first, sum) for the pieces of the sum of `count` rows, at least one, over their
// vectors [first, last).
template <class T, bool kWeighted, class Body>
__device__ void for_each_sum(std::byte* ring, const WarpTerms& terms, int count,
                             std::uint32_t first, std::uint32_t last, Body&& body) {
  TermRing coming(ring, terms, count, first, last);
#pragma unroll 1
  for (; first < last; first += TermPieces::kColumns) {
    PieceSum<T> sum;
    uint4 x[TermPieces::kVectors];
    coming.take(x);
#pragma unroll
    for (int j = 0; j < TermPieces::kVectors; ++j) {
      T::unpack(x[j], sum[j]);
#pragma unroll
      for (int n = 0; kWeighted && n < T::kPerVector; ++n) {
        sum[j][n] = __fmul_rn(terms.weight[0], sum[j][n]);
      }
    }
#pragma unroll 1
    for (int r = 1; r < count; ++r) {
      coming.take(x);
      const float weight = kWeighted ? terms.weight[r] : 1.0f;
#pragma unroll
      for (int j = 0; j < TermPieces::kVectors; ++j) add_term<T, kWeighted>(sum[j], x[j], weight);
    }
    body(first, sum);
  }
}

// Writes a piece in codes into a cell of so many columns.
template <class T>
__device__ void put_codes(std::byte* cell, const PieceSum<T>& sum, const QuantiseFormat& format,
                          std::uint32_t columns, std::uint32_t first, std::uint32_t last) {
  using Piece = CodePiece<T>;
  typename Piece::Vector codes[TermPieces::kVectors];
  const auto at = [&](int j, float(&x)[T::kPerVector]) {
#pragma unroll
    for (int n = 0; n < T::kPerVector; ++n) x[n] = sum[j][n];
  };
  const float scale = encode_piece<T>(at, format, codes);
#pragma unroll
  for (int j = 0; j < TermPieces::kVectors; ++j) {
    const std::uint32_t v = first + lane_id() + j * 32;
    if (v >= last) continue;
    std::byte* const to = cell + std::uint64_t{v} * T::kPerVector;
    if constexpr (T::kPerVector == 8) {
      ptx::st_streaming(to, make_uint2(codes[j].word[0], codes[j].word[1]));
    } else {
      ptx::st_streaming(to, codes[j].word[0]);
    }
  }
  const auto per_block = Piece::kLanes;  // vectors
  const std::uint32_t block = first / per_block + Piece::block_of(lane_id() % 4);
  if (lane_id() % per_block < TermPieces::kVectors && block < last / per_block) {
    ptx::st_streaming(cell + columns + block * sizeof(float), __float_as_uint(scale));
  }
}

template <class T>
__device__ void put_numbers(std::byte* cell, const PieceSum<T>& sum, std::uint32_t first,
                            std::uint32_t last) {
#pragma unroll
  for (int j = 0; j < TermPieces::kVectors; ++j) {
    const std::uint32_t v = first + lane_id() + j * 32;
    if (v >= last) continue;
#pragma unroll
    for (int n = 0; n < T::kPerVector; n += 4) {
      const auto word = [&](int i) { return __float_as_uint(sum[j][n + i]); };
      ptx::st_streaming(cell + (std::uint64_t{v} * T::kPerVector + n) * sizeof(float),
                        make_uint4(word(0), word(1), word(2), word(3)));
    }
  }
}

}  // namespace xd::ep::cuda
