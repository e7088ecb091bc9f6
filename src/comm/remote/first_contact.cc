#include "comm/remote/first_contact.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace xd {
namespace {

// Half of the time is left for telling the others.
constexpr int kLongestContactMs = 60'000;

}  // namespace

FirstContact::FirstContact(Comm& comm)
    : comm_(comm), ms_(std::min(comm.timeout_ms() / 2, kLongestContactMs)) {}

HostWait FirstContact::site(Progress* progress) const {
  return {.phase = XD_PHASE_HOST,
          .group = -1,
          .operation = 0,
          .epoch = 0,
          .deadline = Deadline::after_ms(ms_),
          .timeout_ms = ms_,
          .needs_all_ranks = true,
          .progress = progress};
}

void FirstContact::fail_data(xd_status status, int rank, const std::string& place,
                             const std::string& why) const {
  fail(status, "control reaches ", comm_.errors().names().of(rank), ", data do not (", place,
       "): ", why);
}

void FirstContact::fail_silent(int rank, const std::string& place) const {
  fail_data(
      XD_ERROR_TIMEOUT, rank, place,
      concat("no greeting came within ", ms_, " ms; does a firewall let control through alone?"));
}

}  // namespace xd
