// Memory of CUDA devices.
#pragma once

#include <memory>

#include "support/memory.h"

namespace xd::test {

std::unique_ptr<Memory> make_cuda_memory(int rank);
int cuda_device_count();

}  // namespace xd::test
