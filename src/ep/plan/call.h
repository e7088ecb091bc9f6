// Parts of every operation's arguments.
#pragma once

#include <cstddef>

#include "base/tensor.h"
#include "ep/plan/config.h"

namespace xd::ep {

struct CallContext {
  const Config* config;
  DLDevice device;
};

struct PlanBytes {
  const void* data = nullptr;
  std::size_t bytes = 0;
};

}  // namespace xd::ep
