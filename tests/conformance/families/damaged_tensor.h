// Tensors that a call has to refuse, made from those that it takes.
#pragma once

#include <crossdock/tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace xd::test {

struct DamagedTensor {
  explicit DamagedTensor(const DLTensor& original) : tensor(original) {
    for (int i = 0; i < tensor.ndim; ++i) shape[i] = original.shape[i];
    tensor.shape = shape;
  }
  DamagedTensor(const DamagedTensor&) = delete;
  std::int64_t* last() { return &shape[tensor.ndim - 1]; }
  void give_strides(std::initializer_list<std::int64_t> values) {
    std::ranges::copy(values, strides);
    tensor.strides = strides;
  }

  std::int64_t shape[8] = {};
  std::int64_t strides[8] = {};
  DLTensor tensor;
};

struct Damage {
  const char* name;
  void (*apply)(DamagedTensor&);
  bool of_sizes = false;  // one of the tensors that must fit may be named instead
};

inline void add_extent(DamagedTensor& d) {
  d.shape[d.tensor.ndim] = 1;
  ++d.tensor.ndim;
}

// Strides of 2 along all extents. A stride means nothing along an extent of 1.
inline void spread_out(DamagedTensor& d) {
  for (int i = 0; i < d.tensor.ndim; ++i) d.strides[i] = 2;
  d.tensor.strides = d.strides;
  if (*d.last() == 1) d.tensor.ndim = 0;
}

// Damages that every operation refuses.
inline constexpr Damage kDamages[] = {
    {"WrongType",
     [](DamagedTensor& d) {
       d.tensor.dtype = {kDLFloat, 64, 1};
     }},
    {"Vectors", [](DamagedTensor& d) { d.tensor.dtype.lanes = 2; }},
    {"NoExtents", [](DamagedTensor& d) { d.tensor.ndim = 0; }},
    {"NegativeExtent", [](DamagedTensor& d) { *d.last() = -1; }},
    {"NoShape", [](DamagedTensor& d) { d.tensor.shape = nullptr; }},
    {"Misaligned",
     [](DamagedTensor& d) { d.tensor.data = static_cast<std::byte*>(d.tensor.data) + 2; }},
    {"MisalignedByOffset", [](DamagedTensor& d) { d.tensor.byte_offset += 2; }},
    {"NoData", [](DamagedTensor& d) { d.tensor.data = nullptr; }},
    {"OtherDevice",
     [](DamagedTensor& d) {
       d.tensor.device = {kDLVulkan, 0};
     }},
    {"DeviceOfTheOtherExecutor",
     [](DamagedTensor& d) {
       d.tensor.device = {d.tensor.device.device_type == kDLCPU ? kDLCUDA : kDLCPU, 0};
     }},
};

}  // namespace xd::test
