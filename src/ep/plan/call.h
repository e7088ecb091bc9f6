// Parts of every operation's arguments.
#pragma once

#include <cstddef>

#include "base/tensor.h"
#include "ep/plan/config.h"

namespace xd::ep {

template <class Sizes>
struct CallContextOf {
  const Sizes* config;
  DLDevice device;
};
using CallContext = CallContextOf<Config>;

struct PlanBytes {
  const void* data = nullptr;
  std::size_t bytes = 0;
};

}  // namespace xd::ep
