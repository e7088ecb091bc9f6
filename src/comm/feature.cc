#include "comm/feature.h"

#include "comm/device_kinds.h"

namespace xd {

Feature feature(std::int32_t which) {
  for (const DeviceKind* kind : device_kinds()) {
    if (kind->feature == which) return kind->availability();
  }
  switch (which) {
    case XD_FEATURE_NETWORK:
      return {false, "not built in: this version joins ranks of one host only"};
    default:
      return {false, "unknown feature"};
  }
}

}  // namespace xd
