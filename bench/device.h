// The device on which a rank computes, the host or a GPU, and memory of it. Measurements of every
// kind of device are written once, in terms of these.
#pragma once

#include <crossdock/crossdock.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "workload.h"

namespace bench {

class ComputeDevice {
 public:
  ComputeDevice() = default;
  virtual ~ComputeDevice() = default;
  ComputeDevice(const ComputeDevice&) = delete;
  ComputeDevice& operator=(const ComputeDevice&) = delete;

  virtual DLDevice dl() const = 0;
  // Operations are enqueued on it; null: they have ended when their calls return.
  virtual xd_stream stream() const = 0;
  // Waits for the stream; `what` names the reason where that fails.
  virtual void wait(const char* what) const = 0;

  // Ordinary memory, of undefined content.
  virtual void* alloc(std::size_t bytes) const = 0;
  virtual void free(void* data, std::size_t bytes) const = 0;
  // Sets every byte.
  virtual void fill(void* data, int byte, std::size_t bytes) const = 0;
  // Copies within the device, and to and from the host; it is done at return.
  virtual void copy(void* to, const void* from, std::size_t bytes) const = 0;

  // A function that enqueues, as a graph, what `enqueue` puts on the stream; empty where the device
  // has no graphs.
  virtual std::function<void()> capture(const std::function<void()>& enqueue) const = 0;
};

const ComputeDevice& host();

// Whether memory is zeroed, so that no page is touched for the first time while an operation is
// timed; else it takes, on the host, as many pages as are used.
enum class Pages { zeroed, untouched };

// Memory of a device: symmetric or, without a communicator, ordinary.
class Memory {
 public:
  Memory(xd_comm* symmetric_in, const ComputeDevice& device, std::size_t bytes,
         Pages pages = Pages::zeroed);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  xd_comm* comm_;
  const ComputeDevice& device_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

// Symmetric memory of equal size on every rank. All ranks make theirs in the same order, before any
// other allocation, so that the handles differ in the rank only. Peers may use it after a barrier.
class SharedMemory {
 public:
  SharedMemory(xd_comm* comm, const ComputeDevice& device, std::size_t bytes);
  std::byte* of(int rank) const;

 private:
  xd_comm* comm_;
  Memory memory_;
  xd_mem_handle handle_{};
};

inline constexpr DLDataType kBf16{kDLBfloat, 16, 1}, kFp16{kDLFloat, 16, 1};
inline constexpr DLDataType kFloat{kDLFloat, 32, 1}, kInt32{kDLInt, 32, 1}, kInt64{kDLInt, 64, 1};
inline constexpr DLDataType kE4m3{10, 8, 1};  // kDLFloat8_e4m3fn, which old headers do not name
inline constexpr std::int64_t kScaleColumns = 128;  // of a row that share a scale

// The type of tokens.
DLDataType payload_type(Element element);

// Some copies of a tensor, one behind another, so that an iteration finds nothing in the cache that
// the last one has left. Indices of copies go round.
class Tensor {
 public:
  using Shape = std::vector<std::int64_t>;
  Tensor(xd_comm* symmetric_in, const ComputeDevice& device, DLDataType type, Shape shape,
         int copies = 1, Pages pages = Pages::zeroed);

  static std::size_t bytes(DLDataType type, const Shape& shape, int copies);
  std::size_t bytes() const;  // of one copy, without what lies between copies
  void* data(int copy = 0) const { return dl(copy)->data; }
  const DLTensor* dl(int copy = 0) const { return &tensors_[index(copy)]; }
  int copies() const { return static_cast<int>(tensors_.size()); }
  std::int64_t rows() const { return shape_[0]; }

 private:
  std::size_t index(int copy) const { return static_cast<std::size_t>(copy) % tensors_.size(); }

  Memory memory_;
  Shape shape_;
  std::vector<DLTensor> tensors_;
};

}  // namespace bench
