// What this build can do on this machine.
#pragma once

#include <crossdock/version.h>

namespace xd {

struct Feature {
  bool available;
  const char* reason;  // static: what is missing, or "available"
};

Feature feature(xd_feature which);

}  // namespace xd
