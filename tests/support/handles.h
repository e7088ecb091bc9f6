// Owners of the library's handles, and the check that turns a failed call into an exception.
#pragma once

#include <crossdock/crossdock.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace xd::test {

// A call that a test relies on has failed. Carries the library's own text.
class CallFailed : public std::runtime_error {
 public:
  explicit CallFailed(xd_status status, const std::string& text = xd_last_error())
      : std::runtime_error(std::string(xd_status_name(status)) + ": " + text), status_(status) {}
  xd_status status() const { return status_; }

 private:
  xd_status status_;
};

inline void ok(xd_status status) {
  if (status != XD_SUCCESS) throw CallFailed(status);
}

struct DestroyComm {
  void operator()(xd_comm* comm) const { xd_comm_destroy(comm); }
};
using Comm = std::unique_ptr<xd_comm, DestroyComm>;

struct DestroyGroup {
  void operator()(xd_ep_group* group) const { xd_ep_group_destroy(group); }
};
using Group = std::unique_ptr<xd_ep_group, DestroyGroup>;

inline Comm make_comm(const xd_comm_config& config) {
  xd_comm* comm = nullptr;
  ok(xd_comm_create(&config, &comm));
  return Comm(comm);
}

inline Group make_group(xd_comm* comm, const xd_ep_config& config) {
  xd_ep_group* group = nullptr;
  ok(xd_ep_group_create(comm, &config, &group));
  return Group(group);
}

inline xd_error_info comm_error(xd_comm* comm) {
  xd_error_info info = XD_ERROR_INFO_INIT;
  ok(xd_comm_error(comm, &info));
  return info;
}

inline xd_ep_status group_status(xd_ep_group* group) {
  xd_ep_status status = XD_EP_STATUS_INIT;
  ok(xd_ep_group_status(group, &status));
  return status;
}

}  // namespace xd::test
