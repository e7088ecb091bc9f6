// The arguments of one call by their names in crossdock/ep.h and low_latency.h: buffers, and three
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

// It owns shapes and no memory: XLA's description of the buffers ends with the handler, while the
// buffers live until the operation has been reported as finished.
class Operands {
 public:
  // `alignment` is that of the plan that prepare makes, and `quantise` the way in which dispatch
  // quantises; `phase` is the half of an operation of low_latency.h.
  Operands(DLDevice device, std::int32_t alignment, xd_ep_quantise quantise, xd_ep_phase phase)
      : device_(device), alignment_(alignment), quantise_(quantise), phase_(phase) {}

  // Returns a problem for a type or a number of dimensions that the library does not have.
  std::optional<Problem> add(std::string_view name, const xla::ffi::AnyBuffer& buffer);

  // The buffer of that name, or NULL.
  [[nodiscard]] const DLTensor* find(std::string_view name) const;

  [[nodiscard]] std::int32_t alignment() const { return alignment_; }
  [[nodiscard]] void* data(std::string_view name) const;
  [[nodiscard]] std::size_t bytes(std::string_view name) const;
  [[nodiscard]] xd_ep_quantise quantise() const { return quantise_; }
  [[nodiscard]] xd_ep_phase phase() const { return phase_; }

 private:
  static constexpr std::size_t max_dims = 4;
  struct Item {
    std::string_view name;
    DLTensor tensor{};
    std::array<std::int64_t, max_dims> shape{};
  };

  DLDevice device_;
  std::int32_t alignment_;
  xd_ep_quantise quantise_;
  xd_ep_phase phase_;
  std::vector<std::unique_ptr<Item>> items_;  // tensors point into their items
};

}  // namespace xdjax
