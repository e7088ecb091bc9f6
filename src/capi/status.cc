#include <crossdock/status.h>
#include <crossdock/version.h>

#include "base/error.h"

const char* xd_status_name(xd_status status) {
  switch (status) {
    case XD_SUCCESS:
      return "XD_SUCCESS";
    case XD_ERROR_INVALID_ARGUMENT:
      return "XD_ERROR_INVALID_ARGUMENT";
    case XD_ERROR_MISMATCH:
      return "XD_ERROR_MISMATCH";
    case XD_ERROR_OVERFLOW:
      return "XD_ERROR_OVERFLOW";
    case XD_ERROR_TIMEOUT:
      return "XD_ERROR_TIMEOUT";
    case XD_ERROR_PEER_LOST:
      return "XD_ERROR_PEER_LOST";
    case XD_ERROR_ABORTED:
      return "XD_ERROR_ABORTED";
    case XD_ERROR_BUSY:
      return "XD_ERROR_BUSY";
    case XD_ERROR_OUT_OF_MEMORY:
      return "XD_ERROR_OUT_OF_MEMORY";
    case XD_ERROR_UNSUPPORTED:
      return "XD_ERROR_UNSUPPORTED";
    case XD_ERROR_SYSTEM:
      return "XD_ERROR_SYSTEM";
    case XD_ERROR_INTERNAL:
      return "XD_ERROR_INTERNAL";
  }
  return "XD_UNKNOWN_STATUS";
}

const char* xd_last_error(void) { return xd::last_error(); }

int32_t xd_version(void) { return XD_VERSION; }

int32_t xd_feature_available(xd_feature feature, const char** reason) {
  const char* text = "unknown feature";
  int32_t available = 0;
  switch (feature) {
    case XD_FEATURE_CPU:
      text = "available";
      available = 1;
      break;
    case XD_FEATURE_CUDA:
      text = "not built in: this version has no CUDA executor";
      break;
    case XD_FEATURE_NETWORK:
      text = "not built in: this version joins ranks of one host only";
      break;
    case XD_FEATURE_GEMM:
      text = "not built in: this version has no communication overlapped with GEMM";
      break;
  }
  if (reason != nullptr) *reason = text;
  return available;
}
