// Devices: their properties, the library's requirements, and making one the current device.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

namespace xd::cuda {

using Uuid = std::array<unsigned char, 16>;  // identity of a device, the same in every process

struct DeviceFacts {
  int ordinal = -1;
  std::string name;
  Uuid uuid{};
  int multiprocessors = 0;
  int major = 0, minor = 0;  // compute capability
  std::string pci_address{};
};

// Checks all that the library needs of this machine and of the device. Throws UNSUPPORTED naming
// the requirement that is missing, INVALID_ARGUMENT if there is no such device. Makes no context.
DeviceFacts require_device(int ordinal);

// The reason why no device of this machine can be used; empty if one can. Never throws.
std::string why_unavailable() noexcept;

// How many devices this process sees; 0 also where CUDA fails. Never throws.
int visible_devices() noexcept;

// The place of a device on PCI buses: "0000:17:00.0", in small letters as sysfs writes them; ""
// where CUDA fails. Never throws, makes no context.
std::string pci_address(int ordinal) noexcept;

// The device of this process with that uuid; -1 = not visible here.
int find_device(const Uuid& uuid);

// Throws UNSUPPORTED naming both unless kernels on `device` can load, store and use atomics in
// memory of `owner`, another visible device or the same.
void require_peer_access(int device, int owner);

// "CUDA device 0 (NVIDIA H200)"
std::string describe_device(int ordinal);

// Lets the calling thread allocate, map and wait while some thread captures a stream, perhaps this
// one. Without it such a call fails wherever any thread captures in the global mode, which is the
// default, and invalidates that capture. The library's own allocations and waits are never part of
// a capture.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  bool exchanged_ = false;
  int mode_ = 0;  // the thread's mode before: a CUstreamCaptureMode
};

// Makes a device current for the calling thread, and restores the previous one at the end. (The
// runtime's cudaSetDevice would make a context on the previous device if there was none.) Calls
// under it disturb no capture.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const RelaxedCapture relaxed_;  // first: it also covers the making of a context
};

// False in a forked child of a process that has used CUDA: there CUDA's objects can neither be used
// nor freed.
bool usable_in_this_process() noexcept;

// Runs `work` on the device, for destructors. Errors are ignored, since the context may be gone
// with the program's end.
template <class Work>
void try_on_device(int ordinal, Work&& work) noexcept {
  if (!usable_in_this_process()) return;
  try {
    const DeviceGuard guard(ordinal);
    work();
  } catch (...) {
  }
}

}  // namespace xd::cuda
