// CUDA's virtual memory: physical allocations, which processes hand to each other as file
// descriptors, and the addresses they are mapped at.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <utility>

#include "base/fd.h"

namespace xd::cuda {

// A handle of a physical allocation, released when this goes; the memory stays while it is mapped.
class Allocation {
 public:
  // In units of the device's granularity, shareable. Throws OUT_OF_MEMORY with what was asked for
  // and what is there; `what` starts the text.
  static Allocation create(int device, std::size_t bytes, const char* what);
  // What is mapped at an address of this process; empty if the driver knows of nothing.
  static Allocation at(CUdeviceptr address);
  // What another process has shared.
  static Allocation import(const UniqueFd& fd);

  Allocation() = default;
  Allocation(Allocation&& other) noexcept
      : handle_(std::exchange(other.handle_, 0)), bytes_(other.bytes_) {}
  Allocation& operator=(Allocation&&) = delete;
  ~Allocation();

  explicit operator bool() const { return handle_ != 0; }
  CUmemGenericAllocationHandle get() const { return handle_; }
  std::size_t bytes() const { return bytes_; }  // of create()
  bool shareable() const;                       // by share()
  UniqueFd share() const;

 private:
  CUmemGenericAllocationHandle handle_ = 0;
  std::size_t bytes_ = 0;
};

// The first `bytes` of an allocation at an address of their own, until this goes. No device has
// access yet.
class Mapping {
 public:
  Mapping(int device, const Allocation& allocation, std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* base() const;

 private:
  int device_;  // where a context is
  CUdeviceptr base_ = 0;
  std::size_t bytes_;
};

// Lets `device` read and write what is mapped there, if it could not. Access of others stays. Any
// thread.
void allow_access(void* base, std::size_t bytes, int device);

}  // namespace xd::cuda
