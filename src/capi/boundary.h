// Enters the library through the C API on behalf of a rank.
#pragma once

#include <crossdock/comm.h>
#include <crossdock/ep.h>

#include <cstdio>
#include <memory>
#include <utility>

#include "base/error.h"
#include "comm/comm.h"
#include "ep/group.h"

struct xd_comm {
  std::shared_ptr<xd::Comm> comm;
};

struct xd_ep_group {
  std::unique_ptr<xd::ep::Group> group;
};

namespace xd {

// Like guarded(), with "[rank r of W]" behind every error's text.
template <class Body>
xd_status guarded_on(const char* function, const Comm& comm, Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return XD_SUCCESS;
  } catch (...) {
    char where[64];
    std::snprintf(where, sizeof(where), " [rank %d of %d]", comm.rank(), comm.num_ranks());
    return current_exception_status(function, where);
  }
}

// Checks a handle or pointer that the caller must not leave out.
#define XD_REQUIRE_GIVEN(function, pointer)                                   \
  do {                                                                        \
    if ((pointer) == nullptr) {                                               \
      ::xd::set_last_error(function, #pointer " = NULL, expected a pointer"); \
      return XD_ERROR_INVALID_ARGUMENT;                                       \
    }                                                                         \
  } while (0)

// Every operation of a group enters in this way: `call` is given the group.
template <class Call>
xd_status operate(const char* function, xd_ep_group* group, Call&& call) {
  XD_REQUIRE_GIVEN(function, group);
  ep::Group& g = *group->group;
  ep::Group::forget_last_error();
  return guarded_on(function, g.comm(), [&] { std::forward<Call>(call)(g); });
}

}  // namespace xd
