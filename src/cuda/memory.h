// Memory of the library that peers do not see: on the device, and pinned on the host.
//
// Nothing here waits for kernels that run: ranks may be threads that share a device, and a kernel
// of one of them may be waiting for the very rank that allocates.
#pragma once

#include <cstddef>
#include <utility>

#include "base/deadline.h"
#include "cuda/device.h"

namespace xd::cuda {

// Device memory, zeroed. Each call here has done its work when it returns.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // `what` starts error texts. Throws OUT_OF_MEMORY with asked and available bytes.
  DeviceBuffer(int device, std::size_t bytes, const char* what);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : device_(other.device_),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

  // Returns when the bytes are there. Kernels that run meanwhile may read all other bytes.
  void write(std::size_t offset, const void* from, std::size_t bytes) const;
  // Reads into pinned memory; kernels that run meanwhile may be writing the bytes. False: the bytes
  // are not there by the deadline, and may arrive at any later time.
  bool read(std::size_t offset, void* pinned, std::size_t bytes, Deadline deadline) const;

 private:
  int device_ = -1;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Pinned host memory that kernels of all devices see, zeroed. It comes from pages that are reused
// and never given back, as giving them back would wait for kernels.
class PinnedBlock {
 public:
  PinnedBlock() = default;
  // `device` is one where a context exists already; the memory belongs to no device.
  PinnedBlock(int device, std::size_t bytes);
  ~PinnedBlock();
  PinnedBlock(PinnedBlock&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PinnedBlock& operator=(PinnedBlock&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }  // the address for host and devices
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace xd::cuda
