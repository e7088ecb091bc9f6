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

struct DestroyLlGroup {
  void operator()(xd_ll_group* group) const { xd_ll_group_destroy(group); }
};
using LlGroup = std::unique_ptr<xd_ll_group, DestroyLlGroup>;

struct DestroyGemmContext {
  void operator()(xd_gemm_context* context) const { xd_gemm_context_destroy(context); }
};
using GemmContext = std::unique_ptr<xd_gemm_context, DestroyGemmContext>;

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

inline LlGroup make_group(xd_comm* comm, const xd_ll_config& config) {
  xd_ll_group* group = nullptr;
  ok(xd_ll_group_create(comm, &config, &group));
  return LlGroup(group);
}

inline GemmContext make_context(xd_comm* comm, const xd_gemm_config& config) {
  xd_gemm_context* context = nullptr;
  ok(xd_gemm_context_create(comm, &config, &context));
  return GemmContext(context);
}

inline xd_error_info comm_error(xd_comm* comm) {
  xd_error_info info = XD_ERROR_INFO_INIT;
  ok(xd_comm_error(comm, &info));
  return info;
}

// Read the status of a group or context, and so clear it.
inline xd_ep_status group_status(xd_ep_group* group) {
  xd_ep_status status = XD_EP_STATUS_INIT;
  ok(xd_ep_group_status(group, &status));
  return status;
}

inline xd_ll_status group_status(xd_ll_group* group) {
  xd_ll_status status = XD_LL_STATUS_INIT;
  ok(xd_ll_group_status(group, &status));
  return status;
}

inline xd_gemm_status context_status(xd_gemm_context* context) {
  xd_gemm_status status = XD_GEMM_STATUS_INIT;
  ok(xd_gemm_context_status(context, &status));
  return status;
}

// The non-fatal error of this thread's last operation.
inline xd_ep_status last_ep_error() {
  xd_ep_status status = XD_EP_STATUS_INIT;
  ok(xd_ep_last_error(&status));
  return status;
}

inline xd_ll_status last_ll_error() {
  xd_ll_status status = XD_LL_STATUS_INIT;
  ok(xd_ll_last_error(&status));
  return status;
}

inline xd_gemm_status last_gemm_error() {
  xd_gemm_status status = XD_GEMM_STATUS_INIT;
  ok(xd_gemm_last_error(&status));
  return status;
}

}  // namespace xd::test
