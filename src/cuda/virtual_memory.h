// CUDA's virtual memory: physical allocations, which processes hand to each other as file
// descriptors, and the addresses they are mapped at.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "base/fd.h"

namespace xd::cuda {

// A handle of a physical allocation, released when the object goes; the memory stays while it is
// mapped.
class Allocation {
 public:
  // Makes a shareable allocation in units of the device's granularity. Throws OUT_OF_MEMORY with
  // the bytes asked for and available; `what` starts the text.
  static Allocation create(int device, std::size_t bytes, const char* what);
  // The allocation that is mapped at an address of this process; empty if the driver knows of none.
  static Allocation at(CUdeviceptr address);
  // An allocation that another process has shared.
  static Allocation import(const UniqueFd& fd);

  Allocation() = default;
  Allocation(Allocation&& other) noexcept
      : handle_(std::exchange(other.handle_, 0)), bytes_(other.bytes_) {}
  Allocation& operator=(Allocation&&) = delete;
  ~Allocation();

  explicit operator bool() const { return handle_ != 0; }
  CUmemGenericAllocationHandle get() const { return handle_; }
  std::size_t bytes() const { return bytes_; }  // set by create()
  bool shareable() const;                       // true if share() would work
  UniqueFd share() const;

 private:
  CUmemGenericAllocationHandle handle_ = 0;
  std::size_t bytes_ = 0;
};

// Maps the first `bytes` of an allocation at an address of its own, until the object goes. No
// device has access at first.
class Mapping {
 public:
  Mapping(int device, const Allocation& allocation, std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* base() const;

 private:
  int device_;  // a device with a context
  CUdeviceptr base_ = 0;
  std::size_t bytes_;
};

// Maps allocations that are mapped elsewhere in this process once more, one behind the other, and
// gives the device access to them.
class StitchedMapping {
 public:
  // `parts`: where their first bytes are mapped; `bytes`: of each.
  StitchedMapping(int device, const std::vector<const std::byte*>& parts, std::size_t bytes);
  ~StitchedMapping();
  StitchedMapping(const StitchedMapping&) = delete;
  StitchedMapping& operator=(const StitchedMapping&) = delete;

  std::byte* base() const;

 private:
  void map(const std::vector<const std::byte*>& parts);
  void release() noexcept;

  const int device_;
  const std::size_t part_bytes_, bytes_;
  CUdeviceptr base_ = 0;
  std::size_t mapped_ = 0;
};

// Lets `device` read and write the memory that is mapped there, if it could not. Other devices keep
// their access. Any thread.
void allow_access(void* base, std::size_t bytes, int device);

}  // namespace xd::cuda
