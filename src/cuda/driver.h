// Functions of the CUDA driver, found at run time: the library also loads where there is no driver.
#pragma once

#include <cudaTypedefs.h>

#include <cstddef>
#include <cstdint>

namespace xd::cuda {

// XD_DRIVER_FUNCTION(name, version of its signature)
#define XD_DRIVER_FUNCTIONS                                         \
  XD_DRIVER_FUNCTION(cuGetErrorName, 6000)                          \
  XD_DRIVER_FUNCTION(cuGetErrorString, 6000)                        \
  XD_DRIVER_FUNCTION(cuDeviceGet, 2000)                             \
  XD_DRIVER_FUNCTION(cuDeviceGetAttribute, 2000)                    \
  XD_DRIVER_FUNCTION(cuDevicePrimaryCtxRetain, 7000)                \
  XD_DRIVER_FUNCTION(cuCtxPushCurrent, 4000)                        \
  XD_DRIVER_FUNCTION(cuCtxPopCurrent, 4000)                         \
  XD_DRIVER_FUNCTION(cuThreadExchangeStreamCaptureMode, 10010)      \
  XD_DRIVER_FUNCTION(cuMemGetAllocationGranularity, 10020)          \
  XD_DRIVER_FUNCTION(cuMemCreate, 10020)                            \
  XD_DRIVER_FUNCTION(cuMemRelease, 10020)                           \
  XD_DRIVER_FUNCTION(cuMemAddressReserve, 10020)                    \
  XD_DRIVER_FUNCTION(cuMemAddressFree, 10020)                       \
  XD_DRIVER_FUNCTION(cuMemMap, 10020)                               \
  XD_DRIVER_FUNCTION(cuMemUnmap, 10020)                             \
  XD_DRIVER_FUNCTION(cuMemSetAccess, 10020)                         \
  XD_DRIVER_FUNCTION(cuMemExportToShareableHandle, 10020)           \
  XD_DRIVER_FUNCTION(cuMemImportFromShareableHandle, 10020)         \
  XD_DRIVER_FUNCTION(cuMemRetainAllocationHandle, 11000)            \
  XD_DRIVER_FUNCTION(cuMemGetAllocationPropertiesFromHandle, 10020) \
  XD_DRIVER_FUNCTION(cuMemGetAccess, 10020)                         \
  XD_DRIVER_FUNCTION(cuPointerGetAttribute, 4000)                   \
  XD_DRIVER_FUNCTION(cuMemGetAddressRange, 3020)                    \
  XD_DRIVER_FUNCTION(cuTensorMapEncodeTiled, 12000)

// These functions are null where the driver is older than they are.
#define XD_OPTIONAL_DRIVER_FUNCTIONS             \
  XD_DRIVER_FUNCTION(cuStreamGetGreenCtx, 12040) \
  XD_DRIVER_FUNCTION(cuGreenCtxGetDevResource, 12040)

struct Driver {
#define XD_DRIVER_FUNCTION(name, version) PFN_##name##_v##version name = nullptr;
  XD_DRIVER_FUNCTIONS
  XD_OPTIONAL_DRIVER_FUNCTIONS
#undef XD_DRIVER_FUNCTION
};

// The driver's functions take addresses, and descriptors in the place of handles, as numbers.
inline std::byte* as_pointer(std::uint64_t number) {
  return reinterpret_cast<std::byte*>(number);  // NOLINT(performance-no-int-to-ptr)
}

// Throws UNSUPPORTED if there is no driver, or one that is too old; the text says which.
const Driver& driver();

}  // namespace xd::cuda
