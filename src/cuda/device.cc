#include "cuda/device.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "base/error.h"
#include "cuda/capability.h"
#include "cuda/driver.h"
#include "cuda/error.h"

namespace xd::cuda {
namespace {

std::atomic<pid_t> g_process{0};  // the process that has used CUDA; 0 = none yet

int device_count() {
  driver();  // says better than the runtime what is wrong with it
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    cudaGetLastError();
    fail(XD_ERROR_UNSUPPORTED, "this process sees no CUDA device");
  }
  check(error, "cudaGetDeviceCount");
  return count;
}

DeviceFacts query_facts(int ordinal) {
  cudaDeviceProp properties{};
  XD_CUDA_CHECK(cudaGetDeviceProperties(&properties, ordinal));
  DeviceFacts facts{.ordinal = ordinal,
                    .name = properties.name,
                    .multiprocessors = properties.multiProcessorCount,
                    .major = properties.major,
                    .minor = properties.minor};
  static_assert(sizeof(properties.uuid) == sizeof(facts.uuid));
  std::memcpy(facts.uuid.data(), &properties.uuid, sizeof(facts.uuid));
  std::array<char, 32> address;
  std::snprintf(address.data(), address.size(), "%04x:%02x:%02x.0", properties.pciDomainID,
                properties.pciBusID, properties.pciDeviceID);  // GPUs have no function but 0
  facts.pci_address = address.data();
  return facts;
}

// CUDA is asked for the facts once: that takes milliseconds, and they do not change.
const DeviceFacts& facts_of(int ordinal) {
  static std::mutex& mutex = *new std::mutex;
  static std::map<int, DeviceFacts>& known = *new std::map<int, DeviceFacts>;
  const std::lock_guard lock(mutex);
  auto found = known.find(ordinal);
  if (found == known.end()) found = known.emplace(ordinal, query_facts(ordinal)).first;
  return found->second;
}

void require_attribute(const DeviceFacts& facts, CUdevice_attribute attribute, const char* what) {
  CUdevice device = 0;
  XD_CUDA_CHECK(driver().cuDeviceGet(&device, facts.ordinal));
  int value = 0;
  XD_CUDA_CHECK(driver().cuDeviceGetAttribute(&value, attribute, device));
  if (value == 0) {
    fail(XD_ERROR_UNSUPPORTED, describe_device(facts.ordinal), " has no ", what);
  }
}

void require_abilities(const DeviceFacts& facts) {
  const std::string obstacle = capability_obstacle(facts.major, facts.minor);
  if (!obstacle.empty()) {
    fail(XD_ERROR_UNSUPPORTED, describe_device(facts.ordinal), " ", obstacle);
  }
  require_attribute(facts, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, "cooperative launch");
  require_attribute(facts, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                    "virtual memory management");
  require_attribute(facts, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                    "memory handles that are file descriptors");
}

// The context that the runtime uses on a device. It is kept for good, as the runtime keeps it.
CUcontext primary_context(int ordinal) {
  static std::mutex& mutex = *new std::mutex;
  static std::map<int, CUcontext>& contexts = *new std::map<int, CUcontext>;
  const std::lock_guard lock(mutex);
  CUcontext& context = contexts[ordinal];
  if (context != nullptr) return context;
  CUdevice device = 0;
  XD_CUDA_CHECK(driver().cuDeviceGet(&device, ordinal));
  XD_CUDA_CHECK(driver().cuDevicePrimaryCtxRetain(&context, device));
  g_process.store(::getpid(), std::memory_order_relaxed);
  return context;
}

}  // namespace

DeviceFacts require_device(int ordinal) {
  const int count = device_count();
  const RelaxedCapture relaxed;
  XD_REQUIRE(ordinal >= 0 && ordinal < count, "config.device.device_id = ", ordinal,
             ", expected 0 to ", count - 1);
  const DeviceFacts& facts = facts_of(ordinal);
  require_abilities(facts);
  return facts;
}

std::string why_unavailable() noexcept {
  try {
    std::string why;
    const int count = device_count();
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      try {
        require_device(ordinal);
        return "";
      } catch (const Error& error) {
        if (why.empty()) why = error.text();
      }
    }
    return why;
  } catch (const std::exception& error) {
    return error.what();
  }
}

int visible_devices() noexcept {
  try {
    return device_count();
  } catch (const std::exception&) {
    return 0;
  }
}

std::string pci_address(int ordinal) noexcept {
  try {
    const RelaxedCapture relaxed;
    return facts_of(ordinal).pci_address;
  } catch (const std::exception&) {
    return {};
  }
}

int find_device(const Uuid& uuid) {
  const int count = device_count();
  const RelaxedCapture relaxed;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    if (facts_of(ordinal).uuid == uuid) return ordinal;
  }
  return -1;
}

void require_peer_access(int device, int owner) {
  if (device == owner) return;
  const RelaxedCapture relaxed;
  int access = 0;
  XD_CUDA_CHECK(cudaDeviceCanAccessPeer(&access, device, owner));
  if (access == 0) {
    fail(XD_ERROR_UNSUPPORTED, describe_device(device), " cannot access the memory of ",
         describe_device(owner), ": no peer access between them");
  }
  int atomics = 0;
  XD_CUDA_CHECK(
      cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, owner));
  if (atomics == 0) {
    fail(XD_ERROR_UNSUPPORTED, describe_device(device), " has no atomics in the memory of ",
         describe_device(owner), ": they are not connected by NVLink");
  }
}

std::string describe_device(int ordinal) {
  return concat("CUDA device ", ordinal, " (", facts_of(ordinal).name, ")");
}

// The call fails where CUDA has not begun yet, and then no thread captures.
RelaxedCapture::RelaxedCapture() {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  exchanged_ = driver().cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
  mode_ = mode;
}

RelaxedCapture::~RelaxedCapture() {
  auto mode = static_cast<CUstreamCaptureMode>(mode_);
  if (exchanged_) driver().cuThreadExchangeStreamCaptureMode(&mode);
}

DeviceGuard::DeviceGuard(int ordinal) {
  XD_CUDA_CHECK(driver().cuCtxPushCurrent(primary_context(ordinal)));
}

DeviceGuard::~DeviceGuard() {
  CUcontext popped = nullptr;
  driver().cuCtxPopCurrent(&popped);
}

bool usable_in_this_process() noexcept {
  const pid_t user = g_process.load(std::memory_order_relaxed);
  return user == 0 || user == ::getpid();
}

}  // namespace xd::cuda
