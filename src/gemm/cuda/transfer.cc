#include "gemm/cuda/transfer.h"

#include "gemm/cuda/copies.h"
#include "gemm/cuda/kernels.h"

namespace xd::gemm::cuda {

void Transfer::describe_product() const {
  if (call_.product) Operation(w_, *call_.product, {}, turn_, s_).describe_alone();
}

void Transfer::product() const {
  if (call_.product) Operation(w_, *call_.product, {}, turn_, s_).enqueue_alone();
}

void Transfer::copy_rows(std::byte* to, const std::byte* from, std::int64_t rows) const {
  copy(to, from, static_cast<std::uint64_t>(rows) * row_bytes(), c());
}

void Transfer::enqueue() const {
  w_.side->begin();
  w_.side->order(s_, c());
  turn_.open(c());
  if (call_.reduces) return sum();
  gather();
  product();
  w_.side->order(c(), s_);
}

void Transfer::begin() const {
  w_.side->begin();
  w_.side->order(s_, c());
  turn_.open(c());
  gather();
}

void Transfer::gather() const {
  const Shares& shares = call_.shares;
  const std::uint64_t first = static_cast<std::uint64_t>(shares.start(rank())) * row_bytes();
  for (int d = 1; d < ranks(); ++d) {
    std::byte* const peer = w_.areas[at((rank() + d) % ranks())];
    copy_rows(peer + w_.map.gathered + first, call_.in.data, shares.rows(rank()));
    send_flag(w_.group, w_.map.landed, peer, c());
  }
  copy_rows(call_.out.data + first, call_.in.data, shares.rows(rank()));
  wait_landed(w_.group, call_.operation, w_.map.landed, {rank() + 1, ranks() - 1}, c());
  // The rows of the ranks before this one, and behind it.
  const std::byte* const gathered = w_.areas[at(rank())] + w_.map.gathered;
  const std::int64_t next = shares.start(rank()) + shares.rows(rank());
  const std::uint64_t behind = static_cast<std::uint64_t>(next) * row_bytes();
  copy_rows(call_.out.data, gathered, shares.start(rank()));
  copy_rows(call_.out.data + behind, gathered + behind, shares.all() - next);
  launch_close(turn_.params(), c());
}

void Transfer::sum() const {
  const Shares& shares = call_.shares;
  for (int d = 1; d <= ranks(); ++d) {
    const int peer = (rank() + d) % ranks();
    copy_rows(w_.cell_at[at(peer)],
              call_.in.data + static_cast<std::uint64_t>(shares.start(peer)) * row_bytes(),
              shares.rows(peer));
  }
  product();
  w_.side->order(c(), s_);
  launch_sum({.turn = turn_.params(),
              .partials = w_.own_cells,
              .stride = w_.cell_bytes,
              .rows = shares.rows(rank()),
              .columns = call_.in.cols,
              .pitch = call_.in.cols,
              .epilogue = rounding_to(call_.out.type, call_.out.data),
              .aliased = w_.stitched != nullptr},
             call_.in.type, most_sum_blocks(w_, s_), s_);
}

}  // namespace xd::gemm::cuda
