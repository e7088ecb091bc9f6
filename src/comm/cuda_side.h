// DeviceSide on CUDA: the words of comm/device_comm.h, in pinned and in device memory.
#pragma once

#include <memory>
#include <vector>

#include "comm/device_side.h"

namespace xd {

std::unique_ptr<DeviceSide> make_cuda_side(int ordinal, const RankSeat& seat,
                                           std::vector<std::shared_ptr<Segment>> boards);

}  // namespace xd
