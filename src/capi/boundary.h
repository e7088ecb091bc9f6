// Enters the library through the C API on behalf of a rank.
#pragma once

#include <crossdock/comm.h>
#include <crossdock/ep.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/error.h"
#include "comm/comm.h"
#include "ep/group.h"
#include "observe/subject.h"

struct xd_comm {
  std::shared_ptr<xd::Comm> comm;
};

struct xd_ep_group {
  std::unique_ptr<xd::ep::Group> group;
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

template <class Call>
xd_status operate(const char* function, xd_ep_group* group, std::int32_t operation, Call&& call) {
  XD_REQUIRE_GIVEN(function, group);
  return operate_on(function, *group->group, operation, std::forward<Call>(call));
}

// Counts the tokens [T,H] of an operation that has succeeded: its checks have passed.
inline xd_status count_tokens(xd_status status, const xd_ep_group* group, const DLTensor* tokens) {
  if (status != XD_SUCCESS || tokens == nullptr) return status;
  observe::Counters& counters = group->group->subject().counters();
  const auto rows = static_cast<std::uint64_t>(tokens->shape[0]);
  const auto columns = static_cast<std::uint64_t>(tokens->shape[1]);
  counters.tokens.add(rows);
  counters.token_bytes.add(rows * columns * tokens->dtype.bits / 8);
  return status;
}

// The numbers of a sequence, as both kinds of sequences give them.
void tell_stats(const observe::Subject& subject, xd_stats* stats, std::int64_t* wait_ns);

}  // namespace xd
