#include "gemm/cuda/peer_mapped_cells.h"

#include "base/math.h"
#include "gemm/family.h"

namespace xd::gemm::cuda {

std::uint64_t PeerMappedCells::cell_bytes(const Config& config) {
  if (!config.has(XD_GEMM_REDUCE_SCATTER) || config.ranks == 1) return 0;
  const std::uint64_t bytes = static_cast<std::uint64_t>(config.max_tokens) *
                              static_cast<std::uint64_t>(config.max_n) * config.summed_bytes();
  return bytes < kUnit ? 0 : round_up(bytes, kUnit);
}

PeerMappedCells::PeerMappedCells(Comm& comm, const Config& config) {
  const std::uint64_t bytes = cell_bytes(config);
  std::vector<const std::byte*> view, own;
  for (int source = 0; source < config.ranks; ++source) {
    of_source_.push_back(comm.share(kCreateContext, static_cast<std::size_t>(bytes)));
    own.push_back(of_source_.back()[at(comm.rank())]->base());
  }
  for (const auto& cell : of_source_[at(comm.rank())]) {
    at_owner_.push_back(cell->base());
    view.push_back(cell->base());
  }
  comm.collective().agree(kCreateContext, [&] {
    const int device = comm.device().device_id;
    view_ = std::make_unique<xd::cuda::StitchedMapping>(device, view, bytes);
    own_ = std::make_unique<xd::cuda::StitchedMapping>(device, own, bytes);
    return Collective::Contribution{};
  });
}

}  // namespace xd::gemm::cuda
