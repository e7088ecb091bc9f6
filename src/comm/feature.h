// The features of this build that work on this machine.
#pragma once

#include <crossdock/version.h>

#include <cstdint>

namespace xd {

struct Feature {
  bool available;
  const char* reason;  // static: what is missing, or "available"
};

// `which`: an xd_feature that the communicator knows of; gemm answers for its own.
Feature feature(std::int32_t which);

}  // namespace xd
