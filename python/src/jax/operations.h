// The operations of crossdock/ep.h and low_latency.h on buffers that have their names.
#pragma once

#include <crossdock/crossdock.h>

#include "operands.h"

namespace xdjax {

// Runs `operation`, which on CUDA means that it is enqueued on `stream`. Tensors that `operands`
// lacks are absent in the call.
xd_status run(xd_ep_operation operation, xd_ep_group* group, const Operands& operands,
              xd_stream stream);

}  // namespace xdjax
