// The CPU executor: every operation has finished when its call returns.
#pragma once

#include "ep/executors.h"

namespace xd::ep::cpu {

extern const Executor kExecutor;

}  // namespace xd::ep::cpu
