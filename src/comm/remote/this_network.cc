#include "comm/remote/network.h"

namespace xd {

const Network& network() {
  static const Network machines;
  return machines;
}

}  // namespace xd
