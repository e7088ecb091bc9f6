// A layer's two passes as operations of a group, and local calls between them.
#pragma once

#include <crossdock/moe.h>

#include <memory>

#include "ep/bulk/group.h"
#include "moe/streams.h"

namespace xd::moe {

// Throw the first error. The peers have heard of it, unless nothing was to come that they take part
// in. `streams`: the group's, made by the first pass by parts.
void forward(ep::Group& group, std::unique_ptr<Streams>& streams, const xd_moe_forward_args* args,
             xd_stream stream);
void backward(ep::Group& group, std::unique_ptr<Streams>& streams, const xd_moe_backward_args* args,
              xd_stream stream);

}  // namespace xd::moe
