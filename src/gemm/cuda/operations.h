// The operations of a context as launches. Nothing here waits on the host, and everything can be
// captured.
//
//   s = the caller's stream, c = the context's own stream; │ = ordered by stream, ► by event
//
//   all_gather by copies                        reduce_scatter by copies
//   c                      s                    c                      s
//   open ◄──────────────── (caller's work)      open ◄──────────────── (caller's work)
//   │   └────────────┐     product, own rows    copy to r+1 ◄───────── product, rows of r+1
//   copy, flag to p1 │     │                    copy to r+2 ◄───────── product, rows of r+2
//   copy, flag to p2 └───► landed: sources      │                      product, own rows, into cell
//   │                      product, their rows  └────────────────────► sum: waits, sums, ends
//   close ───────────────► landed, product ..
//
//   all_reduce by copies: partial sums as above, with flags, then on c: landed, sums of the own
//   rows, copies of these with flags, landed, copies into D, close. Where all ranks finish all
//   rows: landed, float32 sums of the own rows, copies of their first half with flags, landed,
//   copies of the rest into the cells, with flags, landed, close; then on s all rows are finished.
//
//   reduce_scatter by the product's stores, on s: open, product into the owners' cells, sum.
//
// In all_gather by a kernel (push, words), and where sums travel as words, the operation is one
// launch on s, in front of the product or behind it.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/side_stream.h"
#include "cuda/stream.h"
#include "gemm/calls.h"
#include "gemm/cost_model.h"
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/params.h"
#include "gemm/cuda/products.h"
#include "gemm/cuda/schedule.h"

namespace xd::gemm::cuda {

using xd::cuda::SideStream;

// The memory, streams and engines that operations use, made with the context.
struct Workshop {
  Group group{};
  ContextMap map{};
  std::vector<std::byte*> areas;  // the memory that each rank shares, by rank
  std::byte* scratch = nullptr;   // products before they are summed or finished
  std::uint64_t scratch_bytes = 0;
  std::byte* exact = nullptr;  // exact results, where the products are still needed; before those,
                               // products that are rounded to the terms of a sum
  std::uint64_t exact_bytes = 0;
  float* columns = nullptr;  // column sums of this rank
  // Scales of 1, and room for those of a and of b; of each so many.
  const float* ones = nullptr;
  float* a_scales = nullptr;
  float* b_scales = nullptr;
  std::int64_t scales_count = 0;
  std::byte* block_scales = nullptr;  // working memory of products with scales per 128 columns
  std::uint64_t block_scale_bytes = 0;
  // Partial sums: this rank's cell at each owner, and the first of the cells that this rank owns.
  // Where a product can store into the owners' cells, they are one matrix to it, else nullptr.
  std::vector<std::byte*> cell_at;
  std::byte* own_cells = nullptr;
  std::byte* stitched = nullptr;
  std::uint64_t cell_bytes = 0;
  Products* products = nullptr;
  SideStream* side = nullptr;
  int multiprocessors = 0;       // of the device, for this rank
  int comm_multiprocessors = 0;  // of these, for kernels that peers take part in; 0 = all
  bool shares_device = false;    // with other ranks
  bool keeps_gathered = false;   // all gathered rows stay, the own ones included
};

// An operation's turn while the host enqueues it.
class EnqueuedTurn {
 public:
  // `entered` becomes true with the first launch that carries the turn: from then on the operation
  // must come to its end, since peers are in it.
  EnqueuedTurn(const TurnParams& params, bool& entered) : params_(params), entered_(entered) {}

  const TurnParams& params() const { return params_; }
  void note_entered() const { entered_ = true; }
  void open(cudaStream_t stream) const {
    launch_open(params_, stream);
    note_entered();
  }

 private:
  const TurnParams params_;
  bool& entered_;
};

// The multiprocessors for kernels of a context on this stream.
inline int multiprocessors_of(const Workshop& workshop, cudaStream_t stream) {
  return xd::cuda::multiprocessors_of(stream, workshop.multiprocessors);
}

// Likewise for those that peers take part in, and which may wait with all their blocks.
inline int comm_multiprocessors_of(const Workshop& workshop, cudaStream_t stream) {
  const int all = multiprocessors_of(workshop, stream);
  const int most = workshop.comm_multiprocessors;
  return most > 0 ? std::min(all, most) : all;
}

// The blocks of a sum. One that waits for a late rank holds registers and shared memory where its
// blocks are. The blocks of a launch spread over the multiprocessors before two come to one, so
// where ranks share the device each sum has one for each multiprocessor of its rank alone: products
// of the late rank find the others free. For the same reason a sum that may take so many
// multiprocessors has one block for each.
inline int most_sum_blocks(const Workshop& workshop, cudaStream_t stream) {
  const bool one_each = workshop.shares_device || workshop.comm_multiprocessors > 0;
  return comm_multiprocessors_of(workshop, stream) * (one_each ? 1 : kSumsPerMultiprocessor);
}

class Operation {
 public:
  Operation(const Workshop& workshop, const ProductCall& call, const Option& option,
            const EnqueuedTurn& turn, cudaStream_t stream)
      : w_(workshop), call_(call), option_(option), turn_(turn), s_(stream) {}

  // Describes all products to cuBLASLt. Throws UNSUPPORTED if it has none for one of them.
  void describe_products() const;
  void enqueue() const;
  // The same of a product that is no part of an operation over ranks: its rows are those of a.
  void describe_alone() const;
  void enqueue_alone() const;
  // A product that cuBLASMp computes and transfers: where it is stored, and what comes behind it.
  std::byte* begin_by_cublasmp() const;
  void end_by_cublasmp() const;

 private:
  bool in_one_product() const {
    return option_.algo == XD_GEMM_ALGO_SEQUENTIAL || option_.algo == XD_GEMM_ALGO_DIRECT;
  }
  // The rows of ranks that follow one another, [first, second).
  std::pair<std::int64_t, std::int64_t> rows_of(Sources sources) const {
    const int last = sources.first + sources.count - 1;
    return {call_.shares.start(sources.first), call_.shares.start(last) + call_.shares.rows(last)};
  }
  // Of `rows` rows among `all_rows`: this rank's, or those of all ranks.
  xd::cuda::ProductShape gathered_shape(std::int64_t rows, std::int64_t all_rows) const;
  xd::cuda::ProductShape partial_shape(std::int64_t rows) const;
  xd::cuda::ProductShape stitched_shape() const;  // of all rows, into the owners' cells

  void all_gather() const;
  void gather_by_push() const;
  void gather_inline() const;
  void gather_by_copies() const;
  void send_rows() const;
  void take_steps() const;
  void keep_own_rows() const;
  void return_gathered() const;
  // Of float32 products of `rows` tokens from `first` on.
  void finish_products(float* product, std::int64_t first, std::int64_t rows) const;
  // So many of the call's rows have room as float32 products, at least one where it has none.
  std::int64_t rows_in(std::uint64_t bytes) const;
  // Likewise of what is described: throws UNSUPPORTED where not even some have.
  std::int64_t require_rows_in(std::uint64_t bytes) const;
  // Calls act(first source, first token, tokens) for each product of the sources' gathered rows.
  template <class Do>
  void for_each_product(Sources sources, Do&& act) const;
  // Describes the products that make one up.
  void describe_one(const xd::cuda::ProductShape& shape) const;
  // A product of this rank, with alpha and the scales of the call.
  void run(const xd::cuda::ProductShape& shape, xd::cuda::ProductPointers pointers,
           float beta = 0.0f) const;
  void run_with_block_scales(const xd::cuda::ProductShape& shape,
                             xd::cuda::ProductPointers pointers) const;
  void own_product() const;
  void gathered_products(Sources sources) const;
  void multiply(const xd::cuda::ProductShape& shape, xd::cuda::ProductPointers pointers,
                std::int64_t first) const;
  void copy_own_rows(std::byte* gathered, cudaStream_t stream) const;
  void copy_own_scales(std::byte* owner, cudaStream_t stream) const;
  // Where a source's scales begin among those of all.
  std::uint64_t scale_offset(int source) const;

  void reduce() const;
  void reduce_by_words() const;
  void reduce_by_copies() const;
  void reduce_by_stores() const;
  void send_partials(int peer) const;
  void gather_sums() const;
  void gather_finished_rows(Sources peers) const;
  void gather_exact_sums(Sources peers) const;
  void finish_exact_sums() const;
  void sum_own_rows(const Epilogue& epilogue) const;
  // The rows of a sum that a rank owns.
  std::int64_t owned_from(int owner) const;
  std::int64_t owned_rows(int owner) const;
  xd::cuda::ProductPointers pointers(std::int64_t first, void* d) const;
  // The terms of a sum over ranks.
  void describe_terms(std::int64_t rows) const;
  void partial_product(std::int64_t first, std::int64_t rows, std::byte* to) const;
  void sum_cells(std::int64_t pitch) const;

  // Column sums of exact results, if they are wanted: behind the launch that has stored these.
  void sum_columns(const float* exact, std::int64_t rows, bool adds = false) const;
  void clear_amax() const;

  int multiprocessors() const { return multiprocessors_of(w_, s_); }
  int comm_multiprocessors() const { return comm_multiprocessors_of(w_, s_); }
  // Whether a launch may take multiprocessors while the product before it still runs. Where ranks
  // share the device, products of a late one may need them.
  bool may_depend() const { return !w_.shares_device; }
  int rank() const { return w_.group.rank(); }
  int ranks() const { return w_.group.ranks(); }
  cudaStream_t c() const { return w_.side->get(); }
  std::byte* area(int r) const { return w_.areas[at(r)]; }
  std::uint64_t row_bytes_of_a() const { return call_.a.row_bytes(); }
  std::uint64_t partial_row_bytes() const {
    return static_cast<std::uint64_t>(call_.n) * dtype_bytes(call_.wide_type());
  }

  const Workshop& w_;
  const ProductCall& call_;
  const Option& option_;
  const EnqueuedTurn& turn_;
  const cudaStream_t s_;
};

}  // namespace xd::gemm::cuda
