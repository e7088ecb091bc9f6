// all_reduce by copies, from where all partial sums of the own rows have come: see operations.h.
#include "gemm/cuda/call_shape.h"
#include "gemm/cuda/copies.h"
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/operations.h"

namespace xd::gemm::cuda {

// The own rows are summed on the stream of the copies when all partial sums of them are
// there.
void Operation::gather_sums() const {
  const Sources peers{rank() + 1, ranks() - 1};
  const bool exact = all_finish_all(call_);
  w_.side->order(s_, c());
  wait_landed(w_.group, call_.operation, w_.map.summed, peers, c());
  exact ? gather_exact_sums(peers) : gather_finished_rows(peers);
  launch_close(turn_.params(), c());
  w_.side->order(c(), s_);
  if (exact) finish_exact_sums();
}

void Operation::sum_own_rows(const Epilogue& epilogue) const {
  launch_part_sum({.turn = turn_.params(),
                   .partials = w_.own_cells,
                   .stride = w_.cell_bytes,
                   .rows = owned_rows(rank()),
                   .columns = call_.n,
                   .pitch = call_.n,
                   .epilogue = epilogue},
                  call_.wide_type(), most_sum_blocks(w_, s_), c());
}

// The own rows of D go to all peers. The peers' rows are copied into D when all of them have come.
void Operation::gather_finished_rows(Sources peers) const {
  const std::int64_t start = owned_from(rank());
  sum_own_rows(epilogue_from(call_, start));
  const std::uint64_t row = call_.d.row_bytes();
  for (int d = 1; d < ranks(); ++d) {
    const int peer = (rank() + d) % ranks();
    copy(area(peer) + w_.map.sums + bytes_of(start, row), call_.d.data + bytes_of(start, row),
         bytes_of(owned_rows(rank()), row), c());
    send_flag(w_.group, w_.map.landed, area(peer), c());
  }
  wait_landed(w_.group, call_.operation, w_.map.landed, peers, c());
  const std::byte* const sums = area(rank()) + w_.map.sums;
  const std::int64_t next = start + owned_rows(rank());
  copy(call_.d.data, sums, bytes_of(start, row), c());
  copy(call_.d.data + bytes_of(next, row), sums + bytes_of(next, row),
       bytes_of(call_.a_rows - next, row), c());
}

// The own rows' float32 sums go to all peers, from scratch, which is free: all partial sums have
// been copied. The first half of the rows goes where finished rows do, as many bytes. The rest goes
// into the cells at the peers, whose partial sums a peer has read when it has sent its first half.
void Operation::gather_exact_sums(Sources peers) const {
  sum_own_rows(rounding_to(DType::f32, w_.scratch));
  const std::uint64_t row = bytes_of(call_.n, sizeof(float));
  const std::int64_t rows = owned_rows(rank()), half = ContextMap::exact_rows_in_sums(rows);
  for (int d = 1; d < ranks(); ++d) {
    std::byte* const to = area((rank() + d) % ranks());
    copy(to + w_.map.exact_sums_of(rank()), w_.scratch, bytes_of(half, row), c());
    send_flag(w_.group, w_.map.landed, to, c());
  }
  wait_landed(w_.group, call_.operation, w_.map.landed, peers, c());
  for (int d = 1; d < ranks(); ++d) {
    const int peer = (rank() + d) % ranks();
    copy(w_.cell_at[at(peer)], w_.scratch + bytes_of(half, row), bytes_of(rows - half, row), c());
    send_flag(w_.group, w_.map.spread, area(peer), c());
  }
  wait_landed(w_.group, call_.operation, w_.map.spread, peers, c());
}

// By ascending rows, so that column sums have one order.
void Operation::finish_exact_sums() const {
  for (int owner = 0; owner < ranks(); ++owner) {
    const std::int64_t first = owned_from(owner), rows = owned_rows(owner);
    const std::int64_t half = ContextMap::exact_rows_in_sums(rows);
    std::byte *upper = w_.scratch, *lower = w_.scratch + bytes_of(half * call_.n, sizeof(float));
    if (owner != rank()) {
      upper = area(rank()) + w_.map.exact_sums_of(owner);
      lower = w_.own_cells + static_cast<std::uint64_t>(owner) * w_.cell_bytes;
    }
    // The first piece stores the column sums that others add to, also where there are no rows.
    if (half > 0 || owner == 0) finish_products(reinterpret_cast<float*>(upper), first, half);
    if (rows > half) finish_products(reinterpret_cast<float*>(lower), first + half, rows - half);
  }
}

}  // namespace xd::gemm::cuda
