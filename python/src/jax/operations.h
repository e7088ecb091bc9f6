// The operations of crossdock/ep.h on buffers that have their names.
#pragma once

#include <crossdock/crossdock.h>

#include "operands.h"

namespace xdjax {

// Runs `operation`; on CUDA it has been enqueued on `stream` then. Tensors that a call takes and
// `operands` lacks are absent.
xd_status run(xd_ep_operation operation, xd_ep_group* group, const Operands& operands,
              xd_stream stream);

}  // namespace xdjax
