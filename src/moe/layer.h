// A layer's two passes as operations of a group, and local calls between them.
#pragma once

#include <crossdock/moe.h>

#include "ep/bulk/group.h"
#include "moe/streams.h"

namespace xd::moe {

// Throw the first error. The peers have heard of it, unless nothing was to come that they take part
// in. `passes` are the group's; finding them in use by another thread is fatal.
void forward(ep::Group& group, Passes& passes, const xd_moe_forward_args* args, xd_stream stream);
void backward(ep::Group& group, Passes& passes, const xd_moe_backward_args* args, xd_stream stream);

}  // namespace xd::moe
