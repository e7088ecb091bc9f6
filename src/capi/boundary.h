// Enters the library through the C API on behalf of a rank.
#pragma once

#include <crossdock/comm.h>
#include <crossdock/low_latency.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/options.h"
#include "comm/comm.h"
#include "ep/bulk/group.h"
#include "ep/slots/group.h"
#include "moe/streams.h"
#include "observe/subject.h"

struct xd_comm {
  std::shared_ptr<xd::Comm> comm;
};

struct xd_ep_group {
  using Family = xd::ep::Family;
  // Their streams go after the group, which waits for what runs there.
  xd::moe::Passes passes;
  std::unique_ptr<xd::ep::Group> group;
};

struct xd_ll_group {
  using Family = xd::ep::LlFamily;
  std::unique_ptr<xd::ep::LlGroup> group;
};

namespace xd {

// "[rank 0 of 2 (global rank 2) in 'data=1']", to stand behind an error's text.
struct Whereabouts {
  explicit Whereabouts(const Comm& comm) noexcept;
  std::array<char, 160> text{};
};

// Like guarded(), with the rank and the communicator behind every error's text.
template <class Body>
xd_status guarded_on(const char* function, const Comm& comm, Body&& body) noexcept {
  comm.errors().notes().note_thread();
  try {
    std::forward<Body>(body)();
    return XD_SUCCESS;
  } catch (...) {
    return current_exception_status(function, Whereabouts(comm).text.data());
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

// Every call into a group or a context enters in this way: `call` is given the sequence, which
// people may watch. `operation` is the call's number; kNoOperation for a call that is none.
inline constexpr std::int32_t kNoOperation = -1;

template <class Sequence, class Call>
xd_status operate_on(const char* function, Sequence& sequence, std::int32_t operation,
                     Call&& call) {
  Sequence::forget_last_error();
  observe::Call watched(function, sequence.subject(), operation);
  return watched.end(
      guarded_on(function, sequence.comm(), [&] { std::forward<Call>(call)(sequence); }));
}

// The same on the handle of a group, of either kind.
template <class Handle, class Call>
xd_status operate(const char* function, Handle* group, std::int32_t operation, Call&& call) {
  XD_REQUIRE_GIVEN(function, group);
  return operate_on(function, *group->group, operation, std::forward<Call>(call));
}

// Counts the tokens [T,H] of an operation that has succeeded: its checks have passed.
template <class Handle>
xd_status count_tokens(xd_status status, const Handle* group, const DLTensor* tokens) {
  if (status != XD_SUCCESS || tokens == nullptr) return status;
  group->group->count_tokens(*tokens);
  return status;
}

// Makes a group, and the handle of it: make() returns the group.
template <class Handle, class Make>
xd_status create_group(xd_comm* comm, Handle** group, Make&& make) {
  constexpr CollectiveCall kCreate = Handle::Family::kCreate;
  const char* const function = kCreate.name;
  XD_REQUIRE_GIVEN(function, comm);
  if (group != nullptr) *group = nullptr;
  return guarded_on(function, *comm->comm, [&] {
    comm->comm->errors().check_usable();
    comm->comm->make_group(kCreate, [&] {
      XD_REQUIRE(group != nullptr, "group = NULL, expected a pointer");
      auto handle = std::make_unique<Handle>();
      handle->group = make();
      *group = handle.release();
    });
  });
}

// Fills in the caller's status with what the group remembers.
template <class Handle, class Status>
xd_status take_group_status(const char* function, Handle* group, Status* status) {
  XD_REQUIRE_GIVEN(function, group);
  XD_REQUIRE_GIVEN(function, status);
  return guarded_on(function, group->group->comm(), [&] {
    group->group->comm().errors().check_process();
    // The status is taken, and cleared, only once the struct that receives it is known to be good.
    write_struct("status", status, Handle::Family::no_error());
    write_struct("status", status, group->group->take_status());
  });
}

template <class Handle>
xd_status watch_group(const char* function, Handle* group, const volatile std::uint64_t** word) {
  XD_REQUIRE_GIVEN(function, group);
  XD_REQUIRE_GIVEN(function, word);
  return guarded_on(function, group->group->comm(), [&] {
    group->group->comm().errors().check_process();
    *word = group->group->watch();
  });
}

// The number of experts on a rank of a config that has been read.
inline std::int32_t local_experts_of(const ep::CommonConfig& config, std::int32_t rank) {
  XD_REQUIRE(rank >= 0 && rank < config.ranks, "rank = ", rank, ", expected 0 to ",
             config.ranks - 1);
  return config.map().local_experts(rank);
}

// The device type of a config that names one, or none.
inline std::int32_t device_type_of(const ep::CommonConfig& config) {
  return config.device_type != 0 ? config.device_type : kDLCPU;
}

// The numbers of a sequence, as both kinds of sequences give them.
void tell_stats(const observe::Subject& subject, xd_stats* stats, std::int64_t* wait_ns);

}  // namespace xd
