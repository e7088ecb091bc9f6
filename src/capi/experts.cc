// Operations on experts' rows: gated.h and grouped.h.
#include <crossdock/gated.h>
#include <crossdock/grouped.h>

#include "capi/boundary.h"
#include "ep/executors.h"
#include "ep/experts/gated.h"
#include "ep/experts/grouped.h"

namespace {

using xd::ep::ExpertsExecutor;

// Calls body(executor, device).
template <class Body>
xd_status run(const char* function, xd_comm* comm, Body&& body) {
  XD_REQUIRE_GIVEN(function, comm);
  const xd::Comm& c = *comm->comm;
  return xd::guarded_on(function, c, [&] {
    c.errors().check_open();
    body(xd::ep::experts_executor_for(c.device().device_type), c.device());
  });
}

template <class Args>
xd_status run_gated(const char* function, xd_comm* comm, const Args* args, xd_stream stream) {
  return run(function, comm, [&](const ExpertsExecutor& executor, const DLDevice& device) {
    executor.gated(xd::ep::read_gated(args, device), device, stream);
  });
}

template <class Args, class Start>
xd_status run_grouped(const char* function, xd_comm* comm, const Args* args, xd_stream stream,
                      Start ExpertsExecutor::*start) {
  return run(function, comm, [&](const ExpertsExecutor& executor, const DLDevice& device) {
    auto call = xd::ep::read_grouped(args, device);
    call.near_ranks = static_cast<int>(comm->comm->hosts().near().size());
    (executor.*start)(call, device, stream);
  });
}

}  // namespace

xd_status xd_gated(xd_comm* comm, const xd_gated_args* args, xd_stream stream) {
  return run_gated("xd_gated", comm, args, stream);
}

xd_status xd_gated_bwd(xd_comm* comm, const xd_gated_bwd_args* args, xd_stream stream) {
  return run_gated("xd_gated_bwd", comm, args, stream);
}

xd_status xd_grouped_product(xd_comm* comm, const xd_grouped_product_args* args, xd_stream stream) {
  return run_grouped("xd_grouped_product", comm, args, stream, &ExpertsExecutor::grouped_product);
}

xd_status xd_grouped_outer(xd_comm* comm, const xd_grouped_outer_args* args, xd_stream stream) {
  return run_grouped("xd_grouped_outer", comm, args, stream, &ExpertsExecutor::grouped_outer);
}
