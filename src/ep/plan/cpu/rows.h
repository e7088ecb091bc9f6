// Arithmetic and copies of the CPU executor, on single rows, with equal bits on every SIMD target.
//
// Rows of payload types start at a multiple of 16 bytes and are a multiple of 16 bytes long.
//
// Rounding is to nearest, ties to even, as IEEE 754 defines it: overflow gives infinity, results
// below the smallest normal number are denormal. NaN:
//   - a row that is only copied (one unweighted term) keeps sign and payload of a NaN, as far as
//     the payload fits the type, and a signalling NaN becomes quiet;
//   - a NaN that comes out of arithmetic (any weight, two terms or more) is the quiet NaN without
//     sign and payload: 0x7fc0, 0x7e00, 0x7fc00000. Processors differ in which operand's payload
//     they would pass on.
// All this holds in a thread that computes in the standard modes (base/float_modes.h). Where it
// flushes denormal numbers to zero (FTZ, DAZ), conversions do not change, and float32 sums and
// products of denormal numbers do; every result depends on the rounding mode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "ep/plan/quantise.h"
#include "ep/plan/wire_format.h"

namespace xd::rows {

enum class Type { bf16, f16, f32 };

constexpr Type type_of(DType type) {
  return type == DType::bf16 ? Type::bf16 : type == DType::f16 ? Type::f16 : Type::f32;
}

// The way in which a row is stored. `streaming` bypasses the caches, for outputs that are larger
// than the caches. Such stores are weakly ordered: call flush() before a flag says that they have
// happened.
enum class Store { cached, streaming };

// Copies any number of bytes between any addresses; the ranges do not overlap.
void copy(void* dst, const void* src, std::size_t bytes, Store store);

// Copies to `count` destinations; the source is fetched from memory once.
void copy_to_many(void* const* dsts, int count, const void* src, std::size_t bytes, Store store);

void zero(void* dst, std::size_t bytes, Store store);

// Makes this thread's streaming stores visible before any later store of its own.
void flush();

// The terms of a sum: rows in order, divided into partial sums of at least one row each. Partial p
// has rows [partial_ends[p - 1], partial_ends[p]), the first one starts at 0; num_partials >= 1.
// Partials may in turn be divided into sums of hosts: host h has partials [host_ends[h - 1],
// host_ends[h]), likewise.
struct Terms {
  const void* const* rows;
  const float* weights;  // one per row; nullptr: unweighted
  const int* partial_ends;
  int num_partials;
  const int* host_ends = nullptr;  // nullptr: partials are added to one another
  int num_hosts = 0;
  // The rows of the next sum, which are brought into the cache meanwhile. May be empty.
  std::span<const void* const> next_rows{};
};

// out[i] = the sum over partials, in order, of round(sum over the partial's rows, in order), in
// float32, rounded once to `type`; with hosts the sum over hosts, in order, of such sums over each
// host's partials, in float32, rounded once. A weight multiplies its element first; that product is
// rounded to float32 before it is added. The first term starts a sum (nothing is added to a zero),
// so that a sum of one -0 is -0. `out` may be one of the rows.
void sum(Type type, void* out, const Terms& terms, std::size_t n, Store store);

// out[i] = weight * row[i], rounded. `out` may be `row`.
void scale(Type type, void* out, const void* row, float weight, std::size_t n, Store store);

// Sum over i of a[i] * b[i] in float32. Sixteen sums start at +0; sum i mod 16 takes product i,
// rounded before it is added. They are then added pairwise, j and j + 8, j + 4, j + 2, j + 1.
float dot(Type type, const void* a, const void* b, std::size_t n);

// Quantises n bf16 elements, a multiple of format.block, to float8_e4m3fn bytes and a scale per
// block, as xd_ep_quantise in quantise.h says. `scales` need no alignment. x * (1 / scale) of a
// denormal x depends on DAZ, nothing else does.
void quantise_e4m3(const ep::QuantiseFormat& format, void* out, void* scales, const void* bf16_row,
                   std::size_t n);

// How a partial sum of a WireTerms is given.
enum class PartialForm : std::uint8_t {
  rows,    // as rows of the payload type, to be added up and put into the wire's form
  wire,    // as one row in the wire's form
  payload  // as one row of the payload type, which is not put into the wire's form: a host's sum
};

// Terms under a wire that is not SAME, with a form for each partial sum. A row in the wire's form
// has WireFormat::row_bytes: float32, or codes and their scales. Weights are those of rows to be
// added up.
struct WireTerms {
  Terms sum;
  const PartialForm* forms;
};

// out[i] = the sum over partials, in order, of their values in the wire's form, in float32, rounded
// once to `type`; with several hosts each host's sum is rounded before it is added, but where the
// wire is FLOAT32. A NaN is the quiet one without sign and payload. n is a multiple of 128 under
// wires with codes.
void sum_wire(Type type, const ep::WireFormat& wire, void* out, const WireTerms& terms,
              std::size_t n);

// The same sum in the wire's form. There is one partial, or the wire is FLOAT32.
void encode_wire(Type type, const ep::WireFormat& wire, void* out, const WireTerms& terms,
                 std::size_t n);

}  // namespace xd::rows
