#include <crossdock/gated.h>

#include "capi/boundary.h"
#include "ep/experts/gated.h"
#include "ep/executors.h"

using xd::guarded_on;

namespace {

template <class Args>
xd_status run_gated(const char* function, xd_comm* comm, const Args* args, xd_stream stream) {
  XD_REQUIRE_GIVEN(function, comm);
  const xd::Comm& c = *comm->comm;
  return guarded_on(function, c, [&] {
    c.errors().check_open();
    const auto call = xd::ep::read_gated(args, c.device());
    xd::ep::experts_executor_for(c.device().device_type).gated(call, c.device(), stream);
  });
}

}  // namespace

xd_status xd_gated(xd_comm* comm, const xd_gated_args* args, xd_stream stream) {
  return run_gated("xd_gated", comm, args, stream);
}

xd_status xd_gated_bwd(xd_comm* comm, const xd_gated_bwd_args* args, xd_stream stream) {
  return run_gated("xd_gated_bwd", comm, args, stream);
}
