// Sees how many multiprocessors an operation takes.
#pragma once

#include <functional>
#include <string>

#include "device.h"

namespace bench::gpu {

// Blocks of the largest kernel that `enqueue` puts on the stream, of which a multiprocessor has
// one; 0 = not known. It is captured, not run. `name` is for the text of a failure.
int blocks_of(const std::string& name, const std::function<void()>& enqueue, const Stream& stream);

}  // namespace bench::gpu
