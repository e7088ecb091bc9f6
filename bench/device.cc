#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <utility>

#include "ranks.h"

namespace bench {
namespace {

class Host : public ComputeDevice {
 public:
  DLDevice dl() const override { return {kDLCPU, 0}; }
  xd_stream stream() const override { return nullptr; }
  void wait(const char*) const override {}
  void* alloc(std::size_t bytes) const override {
    void* const data = ::mmap(nullptr, std::max<std::size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    return data;
  }
  void free(void* data, std::size_t bytes) const override {
    ::munmap(data, std::max<std::size_t>(bytes, 1));
  }
  void fill(void* data, int byte, std::size_t bytes) const override {
    std::memset(data, byte, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) const override {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }
  std::function<void()> capture(const std::function<void()>&) const override { return {}; }
};

std::size_t dense_bytes(DLDataType type, const Tensor::Shape& shape) {
  const std::int64_t elements =
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  return static_cast<std::size_t>(elements) * type.bits / 8;
}

std::size_t stride_of(DLDataType type, const Tensor::Shape& shape) {
  constexpr std::size_t kAlignment = 256;
  return (dense_bytes(type, shape) + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

const ComputeDevice& host() {
  static const Host host;
  return host;
}

Memory::Memory(xd_comm* symmetric_in, const ComputeDevice& device, std::size_t bytes, Pages pages)
    : comm_(symmetric_in), device_(device), bytes_(bytes) {
  if (comm_ != nullptr) {
    ok(xd_mem_alloc(comm_, bytes, &data_));
  } else {
    data_ = device.alloc(bytes);
  }
  if (pages == Pages::zeroed && bytes != 0) device.fill(data_, 0, bytes);
  device.wait("zeroing memory");
}

Memory::~Memory() {
  if (comm_ != nullptr) {
    xd_mem_free(comm_, data_);
  } else {
    device_.free(data_, bytes_);
  }
}

SharedMemory::SharedMemory(xd_comm* comm, const ComputeDevice& device, std::size_t bytes)
    : comm_(comm), memory_(comm, device, bytes) {
  ok(xd_mem_export(comm_, memory_.data(), &handle_));
}

std::byte* SharedMemory::of(int rank) const {
  xd_mem_handle handle = handle_;
  handle.rank = rank;
  void* data = nullptr;
  ok(xd_mem_import(comm_, &handle, &data));
  return static_cast<std::byte*>(data);
}

DLDataType payload_type(Element element) {
  switch (element) {
    case Element::bf16:
    case Element::bf16_to_fp8:
      return kBf16;
    case Element::fp16:
      return kFp16;
    case Element::fp32:
      return kFloat;
    case Element::fp8:
      return kE4m3;
  }
  return {};
}

std::size_t Tensor::bytes(DLDataType type, const Shape& shape, int copies) {
  return stride_of(type, shape) * static_cast<std::size_t>(copies);
}

Tensor::Tensor(xd_comm* symmetric_in, const ComputeDevice& device, DLDataType type, Shape shape,
               int copies, Pages pages)
    : memory_(symmetric_in, device, bytes(type, shape, copies), pages), shape_(std::move(shape)) {
  for (int copy = 0; copy < copies; ++copy) {
    void* const data = memory_.data() + stride_of(type, shape_) * static_cast<std::size_t>(copy);
    tensors_.push_back({data, device.dl(), static_cast<std::int32_t>(shape_.size()), type,
                        shape_.data(), nullptr, 0});
  }
}

std::size_t Tensor::bytes() const { return dense_bytes(tensors_[0].dtype, shape_); }

}  // namespace bench
