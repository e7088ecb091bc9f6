// Turns Python values into C values, with errors that name the argument, and a group's status into
// Python values.
#pragma once

#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "group_config.h"

namespace xdpy {

namespace nb = nanobind;

// TypeError: "<name>: expected <what>, got <value>".
[[noreturn]] void expected(const char* name, const char* what, nb::handle value);

template <class Int>
Int integer(nb::handle value, const char* name) {
  Int result{};
  if (!nb::try_cast<Int>(value, result, /*convert=*/false)) {
    expected(name, sizeof(Int) == 4 ? "an integer of 32 bits" : "an integer of 64 bits", value);
  }
  return result;
}

// The type of DLPack's code and bits in one number, code << 8 | bits: float32 is 0x220.
DLDataType data_type(int packed);

// A tensor argument: None, or (address, shape, dtype) of a C-contiguous tensor, or with its strides
// in elements as a fourth item. It lives as long as the call, and owns nothing.
class Tensor {
 public:
  Tensor(nb::handle spec, const char* name, DLDevice device);
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  // NULL for None.
  [[nodiscard]] const DLTensor* get() const { return given_ ? &tensor_ : nullptr; }

 private:
  static constexpr std::size_t max_dims = 4;

  bool given_ = false;
  DLTensor tensor_{};
  std::array<std::int64_t, max_dims> shape_{}, strides_{};
};

// The address in a Python integer.
inline void* pointer(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}
inline std::uintptr_t address(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}
inline xd_stream stream_of(std::uintptr_t address) {
  return static_cast<xd_stream>(pointer(address));
}

// The ranks of experts from a sequence of integers; none from None. ValueError unless there are
// `num_experts`.
std::vector<std::int32_t> ranks_of_experts(nb::handle sequence, int num_experts);

// The group's sizes from keyword arguments, named as in xd_ep_config; dtype as data_type() takes
// it. TypeError for a name that does not exist.
GroupConfig group_config(const nb::kwargs& options);
// The same by the names of xd_ll_config.
LlGroupConfig ll_group_config(const nb::kwargs& options);

// A dict with the names of the struct's fields; the status is its name.
nb::dict fields_of(const xd_ep_status& status);
nb::dict fields_of(const xd_ll_status& status);

}  // namespace xdpy
