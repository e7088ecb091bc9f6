#include "gemm/cuda/operations.h"

#include <algorithm>

#include "base/error.h"
#include "cuda/error.h"
#include "gemm/cuda/call_shape.h"
#include "gemm/cuda/copies.h"
#include "gemm/cuda/kernels.h"

namespace xd::gemm::cuda {
namespace {

// Calls act(first row, rows) for pieces of at most `most` rows; once also where there are none.
template <class Do>
void in_pieces(std::int64_t rows, std::int64_t most, Do&& act) {
  std::int64_t first = 0;
  do {
    const std::int64_t count = std::min(most, rows - first);
    act(first, count);
    first += count;
  } while (first < rows);
}

}  // namespace

void Operation::enqueue() const {
  clear_amax();
  w_.side->begin();
  call_.operation == XD_GEMM_ALL_GATHER ? all_gather() : reduce();
}

void Operation::describe_products() const {
  const bool gathers = call_.operation == XD_GEMM_ALL_GATHER;
  const std::int64_t all = gathers ? call_.shares.all() : call_.a_rows;
  const auto describe = [&](std::int64_t rows) {
    gathers ? describe_one(gathered_shape(rows, all)) : describe_terms(rows);
  };
  if (option_.mover == Mover::product) {
    return describe_one(stitched_shape());
  }
  if (!gathers) {
    if (in_one_product()) return describe(all);
    for (int r = 0; r < ranks(); ++r) describe(owned_rows(r));
    return;
  }
  const auto describe_sources = [&](Sources sources) {
    for_each_product(sources, [&](int, std::int64_t, std::int64_t rows) { describe(rows); });
  };
  if (in_one_product()) return describe_sources({0, ranks()});
  describe_one(gathered_shape(call_.a_rows, call_.a_rows));
  const GatherSchedule schedule = gather_schedule(option_, rank(), ranks());
  for (int i = 0; i < schedule.steps; ++i) {
    describe_sources(schedule.step[at(i)]);
  }
}

// Where each rank's rows have a scale of their own, so they have a product.
template <class Do>
void Operation::for_each_product(Sources sources, Do&& act) const {
  if (call_.a_scale && call_.scaling == Scaling::tensor) {
    for (int r = sources.first; r < sources.first + sources.count; ++r) {
      act(r, call_.shares.start(r), call_.shares.rows(r));
    }
    return;
  }
  const auto [begin, end] = rows_of(sources);
  act(sources.first, begin, end - begin);
}

xd::cuda::ProductShape Operation::gathered_shape(std::int64_t rows, std::int64_t all_rows) const {
  const bool plain = is_plain(call_);
  return product_shape(call_, rows, all_rows, plain ? call_.d.type : DType::f32, plain);
}

xd::cuda::ProductShape Operation::partial_shape(std::int64_t rows) const {
  return product_shape(call_, rows, call_.a_rows,
                       stores_terms(call_) ? call_.wide_type() : DType::f32, false);
}

xd::cuda::ProductShape Operation::stitched_shape() const {
  xd::cuda::ProductShape shape = partial_shape(call_.a_rows);
  shape.d_pitch = option_.pitch;
  shape.stores_at_peers = true;
  return shape;
}

void Operation::clear_amax() const {
  if (call_.d_amax) XD_CUDA_CHECK(cudaMemsetAsync(call_.d_amax.data, 0, sizeof(float), s_));
}

// ---- all_gather --------------------------------------------------------------------------------

void Operation::all_gather() const {
  if (option_.mover == Mover::copies) {
    gather_by_copies();
  } else {
    option_.mover == Mover::inline_flags ? gather_inline() : gather_by_push();
    turn_.note_entered();
    gathered_products({0, ranks()});
  }
  return_gathered();
  if (is_plain(call_)) return;
  finish_products(reinterpret_cast<float*>(w_.scratch), 0, call_.shares.all());
}

void Operation::gather_by_push() const {
  const std::uint64_t row = row_bytes_of_a();
  launch_push({.turn = turn_.params(),
               .rows = call_.a.data,
               .bytes = bytes_of(call_.a_rows, row),
               .offset = bytes_of(call_.shares.start(rank()), row)},
              comm_multiprocessors(), s_);
}

void Operation::gather_inline() const {
  GatherInlineParams params{.turn = turn_.params(), .rows = call_.a.data, .starts = {}};
  const auto vectors = static_cast<std::int64_t>(row_bytes_of_a() / 16);
  for (int r = 0; r <= ranks(); ++r) {
    params.starts[r] = (r < ranks() ? call_.shares.start(r) : call_.shares.all()) * vectors;
  }
  launch_gather_words(params, comm_multiprocessors(), s_);
}

// The own product is enqueued behind the opening and needs nothing of it, so the two run side by
// side; what comes behind the opening is enqueued while they run. Flags are waited for behind the
// opening, which says which epoch they will have.
//
// Outside graphs the opening reaches the device some microseconds later than the product would, as
// it comes from another stream. Blocks of a long product keep their multiprocessors to its end, and
// no copy begins before that. So such a product waits for a mark in front of the opening. In graphs
// the mark is an edge that is there anyway. Written, not yet run on GPUs: AUTO does without.
void Operation::gather_by_copies() const {
  w_.side->order(s_, c());
  const bool marks = option_.opens_first && call_.algo == XD_GEMM_ALGO_SPLIT && !w_.shares_device;
  if (marks) w_.side->order(c(), s_);
  turn_.open(c());
  const cudaEvent_t opened = w_.side->record(c());
  if (option_.algo != XD_GEMM_ALGO_SEQUENTIAL) own_product();
  send_rows();
  launch_close(turn_.params(), c());
  const cudaEvent_t closed = w_.side->record(c());
  keep_own_rows();
  SideStream::wait(opened, s_);
  take_steps();
  SideStream::wait(closed, s_);
}

// Each flag follows its rows in the same stream: see opening.cu.
void Operation::send_rows() const {
  const GatherSchedule schedule = gather_schedule(option_, rank(), ranks());
  for (int i = 0; i < schedule.sends; ++i) {
    std::byte* const to = area(schedule.to[at(i)]);
    copy_own_rows(to + w_.map.gathered, c());
    copy_own_scales(to, c());
    send_flag(w_.group, w_.map.landed, to, c());
  }
}

// Into the rows of all ranks. Where a is transposed, tokens are columns there.
void Operation::copy_own_rows(std::byte* gathered, cudaStream_t stream) const {
  std::byte* const to = gathered + offset_of_tokens(call_, call_.shares.start(rank()));
  if (!call_.transpose_a) return copy(to, call_.a.data, call_.a.bytes(), stream);
  const std::uint64_t own = call_.a.row_bytes();
  if (own == 0) return;
  const std::uint64_t all = bytes_of(call_.shares.all(), dtype_bytes(call_.a.type));
  XD_CUDA_CHECK(cudaMemcpy2DAsync(to, all, call_.a.data, own, own,
                                  static_cast<std::size_t>(call_.k), cudaMemcpyDeviceToDevice,
                                  stream));
}

// The own rows lie among the gathered ones where somebody reads them there.
void Operation::keep_own_rows() const {
  const bool needed = option_.algo == XD_GEMM_ALGO_SEQUENTIAL || call_.gathered ||
                      call_.gathered_scale || w_.keeps_gathered;
  if (!needed) return;
  copy_own_rows(area(rank()) + w_.map.gathered, s_);
  copy_own_scales(area(rank()), s_);
}

void Operation::copy_own_scales(std::byte* owner, cudaStream_t stream) const {
  if (!call_.a_scale) return;
  copy(owner + w_.map.scales + scale_offset(rank()), call_.a_scale.data, call_.a_scale.bytes(),
       stream);
}

std::uint64_t Operation::scale_offset(int source) const {
  if (call_.scaling == Scaling::tensor) return at(source) * ContextMap::kScaleStride;
  return bytes_of(call_.shares.start(source), call_.a_scale.row_bytes());
}

void Operation::take_steps() const {
  const GatherSchedule schedule = gather_schedule(option_, rank(), ranks());
  const bool whole = option_.algo == XD_GEMM_ALGO_SEQUENTIAL;
  for (int i = 0; i < schedule.steps; ++i) {
    wait_landed(w_.group, call_.operation, w_.map.landed, schedule.step[at(i)], s_);
    if (!whole) gathered_products(schedule.step[at(i)]);
  }
  if (whole) gathered_products({0, ranks()});
}

void Operation::own_product() const {
  multiply(gathered_shape(call_.a_rows, call_.a_rows), pointers(0, nullptr),
           call_.operation == XD_GEMM_ALL_GATHER ? call_.shares.start(rank()) : 0);
}

void Operation::gathered_products(Sources sources) const {
  const std::byte* const own = area(rank());
  for_each_product(sources, [&](int source, std::int64_t first, std::int64_t rows) {
    xd::cuda::ProductPointers from = pointers(0, nullptr);
    from.a = own + w_.map.gathered + offset_of_tokens(call_, first);
    if (call_.a_scale) {
      from.a_scale = reinterpret_cast<const float*>(own + w_.map.scales + scale_offset(source));
    }
    multiply(gathered_shape(rows, call_.shares.all()), from, first);
  });
}

// Stores into the rows of D from `first` on, or into those of the product that is to be finished.
void Operation::multiply(const xd::cuda::ProductShape& shape, xd::cuda::ProductPointers pointers,
                         std::int64_t first) const {
  const bool plain = is_plain(call_);
  const std::uint64_t row =
      static_cast<std::uint64_t>(call_.n) * dtype_bytes(plain ? call_.d.type : DType::f32);
  pointers.d = (plain ? call_.d.data : w_.scratch) + bytes_of(first, row);
  const bool adds = plain && call_.c;
  if (adds) pointers.c = call_.c.data + bytes_of(first, row);
  run(shape, pointers, adds ? call_.beta : 0.0f);
}

void Operation::return_gathered() const {
  if (call_.gathered) {
    copy(call_.gathered.data, area(rank()) + w_.map.gathered, call_.gathered.bytes(), s_);
  }
  if (!call_.gathered_scale) return;
  const std::byte* const scales = area(rank()) + w_.map.scales;
  if (call_.scaling != Scaling::tensor) {
    return copy(call_.gathered_scale.data, scales, call_.gathered_scale.bytes(), s_);
  }
  XD_CUDA_CHECK(cudaMemcpy2DAsync(call_.gathered_scale.data, sizeof(float), scales,
                                  ContextMap::kScaleStride, sizeof(float), at(ranks()),
                                  cudaMemcpyDeviceToDevice, s_));
}

void Operation::finish_products(float* product, std::int64_t first, std::int64_t rows) const {
  Epilogue epilogue = epilogue_from(call_, first);
  // Each thread stores over what it has read.
  if (call_.bias_grad) epilogue.exact = product;
  launch_finish({.product = product, .rows = rows, .columns = call_.n, .epilogue = epilogue},
                multiprocessors(), s_);
  sum_columns(product, rows, first > 0);
}

void Operation::sum_columns(const float* exact, std::int64_t rows, bool adds) const {
  if (!call_.bias_grad) return;
  auto* const sums = call_.bias_grad.as<float>();
  launch_column_sums({.values = exact,
                      .rows = rows,
                      .columns = call_.n,
                      .sums = call_.reduce_bias_grad ? w_.columns : sums,
                      .adds = adds},
                     s_);
  if (!call_.reduce_bias_grad) return;
  launch_column_meeting({.group = w_.group,
                         .operation = call_.operation,
                         .own = w_.columns,
                         .columns = call_.n,
                         .sums = sums},
                        comm_multiprocessors(), s_);
}

// ---- A product alone ---------------------------------------------------------------------------

// All rows, or a multiple of the rows that columns of a transposed operand begin at.
std::int64_t Operation::rows_in(std::uint64_t bytes) const {
  const std::uint64_t row = static_cast<std::uint64_t>(call_.n) * sizeof(float);
  const auto fit = static_cast<std::int64_t>(bytes / row);
  return fit >= call_.a_rows ? std::max<std::int64_t>(call_.a_rows, 1) : fit / 16 * 16;
}

std::int64_t Operation::require_rows_in(std::uint64_t bytes) const {
  const std::int64_t rows = rows_in(bytes);
  if (rows == 0) {
    fail(XD_ERROR_UNSUPPORTED, "b: has N = ", call_.n, ", expected at most ",
         bytes / sizeof(float) / 16, " where a product is rounded behind cuBLASLt (a is ",
         dtype_name(call_.a.type), ", d is ", dtype_name(call_.d.type), ")");
  }
  return rows;
}

void Operation::describe_alone() const {
  const std::int64_t rows = call_.a_rows;
  const bool as_given = call_.a_scale && is_aligned(call_.a_scale.data) && call_.b_scale &&
                        is_aligned(call_.b_scale.data);
  if (call_.scaling == Scaling::rows && !as_given && std::max(rows, call_.n) > w_.scales_count) {
    fail(XD_ERROR_UNSUPPORTED, "product: has ", rows, " rows and N = ", call_.n,
         ", expected at most ", w_.scales_count,
         " of both where scales per row are those of one operand alone, or do not begin at a "
         "multiple of 16 bytes");
  }
  const auto describe = [&](std::int64_t some) { describe_one(gathered_shape(some, rows)); };
  if (is_plain(call_)) return describe(rows);
  in_pieces(rows, require_rows_in(w_.scratch_bytes),
            [&](std::int64_t, std::int64_t count) { describe(count); });
}

void Operation::enqueue_alone() const {
  clear_amax();
  const std::int64_t rows = call_.a_rows;
  if (is_plain(call_)) return own_product();
  in_pieces(rows, rows_in(w_.scratch_bytes), [&](std::int64_t first, std::int64_t count) {
    run(gathered_shape(count, rows), pointers(first, w_.scratch));
    finish_products(reinterpret_cast<float*>(w_.scratch), first, count);
  });
}

// ---- A product by cuBLASMp ---------------------------------------------------------------------

std::byte* Operation::begin_by_cublasmp() const {
  clear_amax();
  return is_plain_for_cublasmp(call_) ? call_.d.data : w_.scratch;
}

void Operation::end_by_cublasmp() const {
  if (is_plain_for_cublasmp(call_)) return;
  finish_products(reinterpret_cast<float*>(w_.scratch), 0, call_.d.rows);
}

// ---- reduce_scatter and all_reduce -------------------------------------------------------------

void Operation::reduce() const {
  if (option_.mover == Mover::product) return reduce_by_stores();
  option_.mover == Mover::copies ? reduce_by_copies() : reduce_by_words();
}

// The owners' cells are free when the opening has seen their records. The product's stores have
// ended when the sums' kernel begins, which raises the done flags behind them.
void Operation::reduce_by_stores() const {
  turn_.open(s_);
  run(stitched_shape(), pointers(0, w_.stitched));
  sum_cells(option_.pitch);
}

xd::cuda::ProductPointers Operation::pointers(std::int64_t first, void* d) const {
  return product_pointers(call_, first, d, w_.ones);
}

void Operation::describe_terms(std::int64_t rows) const {
  if (stores_terms(call_)) return describe_one(partial_shape(rows));
  in_pieces(rows, require_rows_in(w_.exact_bytes),
            [&](std::int64_t, std::int64_t count) { describe_one(partial_shape(count)); });
}

// Rounded terms lie where exact results will, later on the same stream.
void Operation::partial_product(std::int64_t first, std::int64_t rows, std::byte* to) const {
  if (stores_terms(call_)) return run(partial_shape(rows), pointers(first, to));
  if (rows == 0) return;
  in_pieces(rows, rows_in(w_.exact_bytes), [&](std::int64_t begin, std::int64_t count) {
    run(partial_shape(count), pointers(first + begin, w_.exact));
    launch_finish(
        {.product = reinterpret_cast<const float*>(w_.exact),
         .rows = count,
         .columns = call_.n,
         .epilogue = rounding_to(call_.wide_type(), to + bytes_of(begin, partial_row_bytes()))},
        multiprocessors(), s_);
  });
}

void Operation::reduce_by_words() const {
  partial_product(0, call_.a_rows, w_.scratch);
  InlineFlagParams params{.turn = turn_.params(),
                          .product = w_.scratch,
                          .starts = {},
                          .row_vectors = static_cast<std::int64_t>(partial_row_bytes() / 16),
                          .gathers = call_.operation == XD_GEMM_ALL_REDUCE,
                          .one_step = option_.mover == Mover::one_shot,
                          .dependent = may_depend() && call_.a_rows > 0,
                          .epilogue = epilogue_from(call_, 0)};
  const std::int64_t vectors = call_.a_rows * params.row_vectors;
  const std::int64_t part = (vectors + ranks() - 1) / ranks();
  for (int r = 0; r <= ranks(); ++r) {
    params.starts[r] = params.gathers ? std::min(r * part, vectors)
                       : r == ranks() ? vectors
                                      : call_.shares.start(r) * params.row_vectors;
  }
  auto* const exact = reinterpret_cast<float*>(w_.exact);
  if (call_.bias_grad) params.epilogue.exact = exact;
  launch_words(params, call_.wide_type(), comm_multiprocessors(), s_);
  turn_.note_entered();
  sum_columns(exact, call_.d.rows);
}

void Operation::reduce_by_copies() const {
  const std::uint64_t row = partial_row_bytes();
  const bool all = call_.operation == XD_GEMM_ALL_REDUCE;
  w_.side->order(s_, c());
  turn_.open(c());
  const bool whole = option_.algo == XD_GEMM_ALGO_SEQUENTIAL;
  if (whole) {
    partial_product(0, call_.a_rows, w_.scratch);
    w_.side->order(s_, c());
  }
  for (int d = 1; d < ranks(); ++d) {
    const int peer = (rank() + d) % ranks();
    const std::int64_t start = owned_from(peer);
    if (!whole) {
      partial_product(start, owned_rows(peer), w_.scratch + bytes_of(start, row));
      w_.side->order(s_, c());
    }
    send_partials(peer);
    if (all) send_flag(w_.group, w_.map.summed, area(peer), c());
  }
  const std::int64_t start = owned_from(rank());
  std::byte* const own = w_.own_cells + static_cast<std::uint64_t>(rank()) * w_.cell_bytes;
  if (whole) {
    copy(own, w_.scratch + bytes_of(start, row), bytes_of(owned_rows(rank()), row), s_);
  } else {
    partial_product(start, owned_rows(rank()), own);
  }
  if (all) return gather_sums();
  w_.side->order(c(), s_);
  sum_cells(call_.n);
}

// Behind the opening, which has seen the peer's record: its sums of earlier operations have ended.
void Operation::send_partials(int peer) const {
  const std::uint64_t row = partial_row_bytes();
  copy(w_.cell_at[at(peer)], w_.scratch + bytes_of(owned_from(peer), row),
       bytes_of(owned_rows(peer), row), c());
}

// Of all_reduce, ranks own equal parts of the rows.
std::int64_t Operation::owned_from(int owner) const {
  if (call_.operation != XD_GEMM_ALL_REDUCE) return call_.shares.start(owner);
  const std::int64_t part = (call_.a_rows + ranks() - 1) / ranks();
  return std::min(owner * part, call_.a_rows);
}

std::int64_t Operation::owned_rows(int owner) const {
  if (call_.operation != XD_GEMM_ALL_REDUCE) return call_.shares.rows(owner);
  return owned_from(owner + 1) - owned_from(owner);
}

// Everything has been copied, so scratch is free.
void Operation::sum_cells(std::int64_t pitch) const {
  Epilogue epilogue = epilogue_from(call_, 0);
  auto* const exact = reinterpret_cast<float*>(w_.scratch);
  if (call_.bias_grad) epilogue.exact = exact;
  launch_sum({.turn = turn_.params(),
              .partials = w_.own_cells,
              .stride = w_.cell_bytes,
              .rows = call_.shares.rows(rank()),
              .columns = call_.n,
              .pitch = pitch,
              .epilogue = epilogue,
              .aliased = w_.stitched != nullptr},
             call_.wide_type(), most_sum_blocks(w_, s_), s_);
  sum_columns(exact, call_.shares.rows(rank()));
}

}  // namespace xd::gemm::cuda
