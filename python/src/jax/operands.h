// The arguments of one call by their names in crossdock/ep.h and low_latency.h: buffers, and
// numbers.
#pragma once

#include <crossdock/crossdock.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "problem.h"
#include "xla_ffi.h"

namespace xdjax {

// A rank that is masked, or not any more.
struct Mask {
  std::int32_t rank = -1;
  bool masked = false;
};

// What a call is given beside buffers. Each number is for some operations.
struct Numbers {
  std::int32_t alignment = 0;                     // of the plan that prepare makes
  xd_ep_quantise quantise = XD_EP_QUANTISE_NONE;  // how dispatch quantises
  xd_ep_phase phase = XD_EP_PHASE_BOTH;           // the half of an operation of low_latency.h
  Mask mask;
};

// It owns shapes and no memory: XLA's description of the buffers ends with the handler, while the
// buffers live until the operation has been reported as finished.
class Operands {
 public:
  // Of the call of a rank, on its device.
  Operands(DLDevice device, int rank, const Numbers& numbers)
      : device_(device), rank_(rank), numbers_(numbers) {}

  // Returns a problem for a type or a number of dimensions that the library does not have.
  std::optional<Problem> add(std::string_view name, const xla::ffi::AnyBuffer& buffer);

  // The buffer of that name, or NULL.
  [[nodiscard]] const DLTensor* find(std::string_view name) const;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] const Numbers& numbers() const { return numbers_; }
  [[nodiscard]] void* data(std::string_view name) const;
  [[nodiscard]] std::size_t bytes(std::string_view name) const;

 private:
  static constexpr std::size_t max_dims = 4;
  struct Item {
    std::string_view name;
    DLTensor tensor{};
    std::array<std::int64_t, max_dims> shape{};
  };

  DLDevice device_;
  int rank_;
  Numbers numbers_;
  std::vector<std::unique_ptr<Item>> items_;  // tensors point into their items
};

}  // namespace xdjax
