// Cells of partial sums that a product can store into: one allocation for each owner and source, so
// that the cells of one source at all owners can be mapped one after another. To that source they
// are one matrix, whose rows it stores straight into their owners' memory. Each rank's rows fill a
// cell from end to end, however few they are: rows of the matrix then lie further apart.
//
//   allocation [owner o][source s]      mapped as
//   everywhere                          by itself: copies of s store into it
//   at s                                view: [0][s] [1][s] [2][s] ..   the source's product
//   at o                                own:  [o][0] [o][1] [o][2] ..   the owner's sum
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/comm.h"
#include "cuda/virtual_memory.h"
#include "gemm/config.h"

namespace xd::gemm::cuda {

class PeerMappedCells {
 public:
  // Devices share memory in units of so many bytes, so cells begin at multiples of it.
  static constexpr std::uint64_t kUnit = std::uint64_t{2} << 20;
  // Bytes of a cell; 0 where the context's sums are so small that they take other ways.
  static std::uint64_t cell_bytes(const Config& config);

  // Collective, with the device current.
  PeerMappedCells(Comm& comm, const Config& config);

  std::byte* view() const { return view_->base(); }
  std::byte* own() const { return own_->base(); }
  // The cell of this rank at an owner.
  std::byte* at_owner(int owner) const { return at_owner_[static_cast<std::size_t>(owner)]; }

 private:
  std::vector<Segments> of_source_;
  std::vector<std::byte*> at_owner_;
  std::unique_ptr<xd::cuda::StitchedMapping> view_, own_;
};

}  // namespace xd::gemm::cuda
