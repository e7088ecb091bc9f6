#include <crossdock/status.h>
#include <crossdock/version.h>

#include "base/error.h"
#include "base/options.h"
#include "comm/feature.h"
#include "gemm/executors.h"

const char* xd_status_name(xd_status status) { return xd::status_name(xd::raw_enum(status)); }

const char* xd_last_error(void) { return xd::last_error(); }

int32_t xd_version(void) { return XD_VERSION; }

int32_t xd_feature_available(xd_feature feature, const char** reason) {
  const std::int32_t which = xd::raw_enum(feature);
  const xd::Feature answer = which == XD_FEATURE_GEMM       ? xd::gemm::feature()
                             : which == XD_FEATURE_CUBLASMP ? xd::gemm::cublasmp_feature()
                                                            : xd::feature(which);
  if (reason != nullptr) *reason = answer.reason;
  return answer.available ? 1 : 0;
}
