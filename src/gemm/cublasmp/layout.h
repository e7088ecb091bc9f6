// From a checked call to what describes it to cuBLASMp. Pure.
//
// cuBLASMp is column-major, and everything here is row-major: it is given b as its first matrix and
// a as its second one, and computes D transposed, which is D. Its m is our N, its n our M.
//
// A matrix of cuBLASMp lies on all ranks together, in blocks that are dealt out over a grid of
// them. Here each rank has one block, and it is a part of the matrix' columns (a grid of one row of
// ranks) or of its rows (a grid of one column):
//
//   W ranks          first (b)               second (a)              D
//   all_gather       N of W parts            M of W parts            N of W parts, all of M
//   reduce_scatter   K of W parts            K of W parts            M of W parts, all of N
//   all_reduce       K of W parts            K of W parts            [N, W * M] in parts of M
//
// Parts are blocks of ceil(size / W), the last ones smaller.
#pragma once

#include <cstdint>
#include <string>

#include "gemm/calls.h"

namespace xd::gemm::cublasmp {

// A matrix of all ranks, in columns.
struct Spread {
  std::int64_t rows = 0, columns = 0;
  std::int64_t block_rows = 0, block_columns = 0;
  std::int64_t pitch = 0;  // elements from column to column in this rank's part
  DType type = DType::bf16;
  bool parts_of_columns = false;  // on the grid of one row
};

struct Description {
  std::int64_t m = 0, n = 0, k = 0;
  bool transpose_first = false, transpose_second = false;
  Spread first{}, second{}, d{};
  int algorithm = 0;
  int compute = 0;
  int epilogue = 0;
  bool sums = false;  // over the ranks: in the type of D
};

// The memory that a product reads and writes.
struct Operands {
  const void* first = nullptr;
  const void* second = nullptr;
  const void* c = nullptr;
  void* d = nullptr;
  const void* bias = nullptr;
  DType bias_type = DType::bf16;
  const float* first_scale = nullptr;
  const float* second_scale = nullptr;
  float alpha = 1, beta = 0;
};

// The abilities of a communicator of NCCL and a library.
struct Abilities {
  int version = 0;  // of cuBLASMp
  bool multicast = false;
};

// The reason why cuBLASMp cannot carry out the call; empty if there is none that can be told from
// the call alone.
std::string obstacle(const ProductCall& call, const Config& config, const Abilities& abilities);

// `d_type`: as D is stored. `finished`: cuBLASMp adds C and the bias and applies RELU.
Description describe(const ProductCall& call, const Config& config, DType d_type, bool finished);
// A given tensor has an address, some other one where the call's tensor has none. `d`: nullptr =
// none yet.
Operands operands_of(const ProductCall& call, void* d, bool finished);

}  // namespace xd::gemm::cublasmp
