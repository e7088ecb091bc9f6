// Kernels of the benchmark itself: the common start, payloads and their checks, the wire floor.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace bench::gpu {

inline constexpr int kMaxRanks = 72;

// ---- Common start ------------------------------------------------------------------------------
//   slots[r][s]   memory of rank r   written by rank s   rounds that s has reached (release)
//   host          pinned memory      written by host     rounds that are fully enqueued
//   failed        pinned memory      written by kernel   1 = somebody did not come
struct Gate {
  std::uint32_t* slots[kMaxRanks];
  const std::uint32_t* host;
  std::uint32_t* failed;
  int rank;
  int ranks;
  std::uint32_t round;
};

// Ends when the hosts of all ranks have enqueued the operations of this round, so that neither
// their speed nor their skew is measured; or after 20 s.
void launch_gate(const Gate& gate, cudaStream_t stream);
// Loads it on the current device, where kernels are loaded by their first launch: that one might
// wait for another rank's gate.
void load_gate();

// ---- Stamps ------------------------------------------------------------------------------------
// Writes the device's clock, in nanoseconds, when all before it on the stream has ended.
void launch_stamp(std::uint64_t* to, cudaStream_t stream);
// A kernel that does nothing, on every multiprocessor.
void launch_nothing(int blocks, int threads, cudaStream_t stream);

// ---- Payload -----------------------------------------------------------------------------------
// An element is a whole number from -8 to 7 (a byte: from 0 to 255), drawn by seed, source rank,
// token and column. Sums of 32 of them are exact in every type, so every check is for equal bits.
enum class Cell { bf16, fp16, fp32, byte };

struct Payload {
  Cell cell;
  std::int64_t columns;
  std::uint64_t seed;
};

// The token that a row comes from; the row is expected to be `factor` times the token's row.
struct Origin {
  std::int32_t source;
  std::int32_t token;
  std::int32_t factor;
};

// Row t of rows becomes token t of `source`.
void fill_rows(const Payload& payload, int source, void* rows, std::int64_t count,
               cudaStream_t stream);

// Adds the number of elements that are not as expected to *wrong.
void check_rows(const Payload& payload, const void* rows, const Origin* origins, std::int64_t count,
                unsigned long long* wrong, cudaStream_t stream);

// Row by row, *norms is expected to be the product of the row that comes from a token with itself,
// and 0 in padding.
void check_norms(const Payload& payload, const float* norms, const Origin* origins,
                 std::int64_t count, unsigned long long* wrong, cudaStream_t stream);

// Checks rows that were quantised on the way from `payload` to e4m3 bytes, with one scale per 128
// columns.
void check_quantised(const Payload& payload, const void* rows, const float* scales,
                     const Origin* origins, std::int64_t count, unsigned long long* wrong,
                     cudaStream_t stream);

// ---- Wire floor --------------------------------------------------------------------------------
inline constexpr std::uint32_t kPieceBytes = 8192;

struct Piece {
  std::byte* to;  // at a peer
  std::uint64_t from;
  std::uint32_t bytes;  // at most kPieceBytes, a multiple of 16
};

enum class Mover { stores, bulk };  // 16-byte stores of all threads; bulk copies by one per warp

// Must have been called on this device before launch_pieces.
void prepare_movers();
void launch_pieces(Mover mover, int blocks, const Piece* pieces, std::int64_t count,
                   const std::byte* from, cudaStream_t stream);

}  // namespace bench::gpu
