// In the place of nccl/gathering.cc in builds without a CUDA compiler.
#include "base/error.h"
#include "meet/nccl/library.h"

namespace xd {

std::unique_ptr<Bootstrap> bootstrap_by_nccl(const xd_comm_config&) {
  fail(XD_ERROR_UNSUPPORTED,
       "config.bootstrap = XD_BOOTSTRAP_NCCL: this library was built without CUDA");
}

}  // namespace xd
