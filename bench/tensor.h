// Memory of the benchmark's tensors.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "ranks.h"
#include "workload.h"

namespace bench {

// The type of rows without scales.
inline DLDataType payload_type(Element element) {
  switch (element) {
    case Element::bf16:
      return {kDLBfloat, 16, 1};
    case Element::fp16:
      return {kDLFloat, 16, 1};
    case Element::fp32:
      return {kDLFloat, 32, 1};
    default:
      return {};  // refused with the options
  }
}

// A matrix in the symmetric memory of a communicator or, without one, in ordinary memory. It is
// zeroed, so that no page is touched for the first time while an operation is timed.
class Matrix {
 public:
  struct Shape {
    std::int64_t rows, columns;
  };

  Matrix(xd_comm* symmetric_in, DLDataType type, Shape shape)
      : comm_(symmetric_in), shape_{shape.rows, shape.columns} {
    const std::size_t bytes = static_cast<std::size_t>(shape.rows * shape.columns) * type.bits / 8;
    if (comm_ != nullptr) {
      ok(xd_mem_alloc(comm_, bytes, &data_));
    } else {
      data_ = std::aligned_alloc(4096, (bytes + 4096) / 4096 * 4096);
      if (data_ == nullptr) throw std::bad_alloc();
    }
    std::memset(data_, 0, bytes);
    tensor_ = {data_, {kDLCPU, 0}, 2, type, shape_.data(), nullptr, 0};
  }
  ~Matrix() {
    if (comm_ != nullptr) {
      xd_mem_free(comm_, data_);
    } else {
      std::free(data_);
    }
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  const DLTensor* dl() const { return &tensor_; }
  void* data() const { return data_; }

 private:
  xd_comm* comm_;
  void* data_ = nullptr;
  std::array<std::int64_t, 2> shape_;
  DLTensor tensor_{};
};

// Memory of equal size on every rank that all ranks can address. All ranks make theirs in the same
// order, before any other allocation, so that the handles differ in the rank only. The memory is
// freed with the communicator.
class SharedBlock {
 public:
  SharedBlock(xd_comm* comm, std::size_t bytes) : comm_(comm) {
    void* data = nullptr;
    ok(xd_mem_alloc(comm_, bytes, &data));
    std::memset(data, 0, bytes);
    ok(xd_mem_export(comm_, data, &handle_));
  }
  void* of(int rank) const {
    xd_mem_handle handle = handle_;
    handle.rank = rank;
    void* data = nullptr;
    ok(xd_mem_import(comm_, &handle, &data));
    return data;
  }

 private:
  xd_comm* comm_;
  xd_mem_handle handle_{};
};

}  // namespace bench
