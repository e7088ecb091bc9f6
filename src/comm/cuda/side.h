// Memory that the host of a rank shares with its kernels on CUDA: words in pinned memory and tables
// in device memory, as comm/device/comm.h has them.
#pragma once

#include <memory>
#include <vector>

#include "comm/device/kinds.h"

namespace xd {

std::unique_ptr<DeviceSide> make_cuda_side(int ordinal, const RankInfo& info,
                                           std::vector<std::shared_ptr<Segment>> boards);

}  // namespace xd
