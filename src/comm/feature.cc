#include "comm/feature.h"

#include <string>

#include "base/error.h"
#include "comm/device/kinds.h"
#include "net/fabric/fabric.h"

namespace xd {
namespace {

// Looked for once: what is loaded then serves all communicators of the process.
Feature network() {
  static const std::string obstacle = [] {
    try {
      static_cast<void>(net::load_fabric());
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  }();
  if (obstacle.empty()) return {true, "available"};
  return {false, obstacle.c_str()};
}

}  // namespace

Feature feature(std::int32_t which) {
  for (const DeviceKind* kind : device_kinds()) {
    if (kind->feature == which) return kind->availability();
  }
  switch (which) {
    case XD_FEATURE_NETWORK:
      return network();
    case XD_FEATURE_CUDA_WIRE:  // of all builds with CUDA devices
    case XD_FEATURE_CUDA_LL_MACHINES:
    case XD_FEATURE_CUDA_PLACEMENT:
      return feature(XD_FEATURE_CUDA);
    default:
      return {false, "unknown feature"};
  }
}

}  // namespace xd
