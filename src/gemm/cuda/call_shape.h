// From a checked call to what describes it to the cost model, to cuBLASLt and to kernels. Pure.
#pragma once

#include <vector>

#include "cuda/cublaslt.h"
#include "gemm/calls.h"
#include "gemm/cost_model.h"
#include "gemm/cuda/params.h"

namespace xd::gemm::cuda {

// Throws UNSUPPORTED, with what to do instead, for calls that this executor does not carry out by
// any algorithm.
void require_supported(const ProductCall& call);

// cuBLASLt reads vectors of elements at once, also of scales and of a bias.
inline bool is_aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}

// all_reduce: true if each rank finishes the sums of all rows, since it writes more than D.
// Otherwise their owner does, and D travels.
bool all_finish_all(const ProductCall& call);

Problem problem_of(const ProductCall& call, const Config& config);
// The room for a call: of what the context has, the part that the call can use.
// `stitched_bytes`: of a cell that a product can store into, 0 = there are none.
Capacity capacity_of(const ProductCall& call, const ContextMap& map, std::uint64_t stitched_bytes);

// True if cuBLASLt stores products as they are summed over ranks. Otherwise it stores float32,
// which finish_kernel rounds.
bool stores_terms(const ProductCall& call);
// True if cuBLASLt stores D as it shall be. Otherwise it stores float32, and finish_kernel D.
bool is_plain(const ProductCall& call);
// True if cuBLASMp stores D as it shall be. To sums over ranks it adds nothing: what is added or
// applied comes behind the sum, and once.
bool is_plain_for_cublasmp(const ProductCall& call);
// The product of `rows` rows of tokens, of the `all_rows` of the tensor that they are in. `d_type`:
// as it is stored, in packed rows. `finished`: by cuBLASLt, which also adds C.
xd::cuda::ProductShape product_shape(const ProductCall& call, std::int64_t rows,
                                     std::int64_t all_rows, DType d_type, bool finished);
// Where the tokens from `first` on begin in a, or in a of all ranks.
std::uint64_t offset_of_tokens(const ProductCall& call, std::int64_t first);
// Of a's tokens from `first` on. `ones`: as many as a and b have rows.
xd::cuda::ProductPointers product_pointers(const ProductCall& call, std::int64_t first, void* d,
                                           const float* ones);

// Of the rows of d from `first` on. The product has applied alpha.
Epilogue epilogue_from(const ProductCall& call, std::int64_t first);

// The products of most calls of a context, with the bounds' columns; their numbers of rows are any.
std::vector<xd::cuda::ProductShape> usual_shapes(const Config& config);
// These, and those with scales or in TF32: other kernels.
std::vector<xd::cuda::ProductShape> warmed_shapes(const Config& config);
// The types, orders of elements and epilogues of every product that a call may have, without sizes.
std::vector<xd::cuda::ProductShape> all_products();

}  // namespace xd::gemm::cuda
