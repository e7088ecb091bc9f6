// The buffers of one call by their names in crossdock/ep.h, low_latency.h and gemm.h.
#pragma once

#include <crossdock/crossdock.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "../fields.h"
#include "problem.h"
#include "xla_ffi.h"

namespace xdjax {

// It owns shapes and no memory: XLA's description of the buffers ends with the handler, while the
// buffers live until the operation has been reported as finished.
class Operands {
 public:
  static constexpr std::size_t max_dims = 4;

  // Of the call of a rank, on its device.
  Operands(DLDevice device, int rank) : device_(device), rank_(rank) {}

  // Returns a problem for a type or a number of dimensions that the library does not have.
  std::optional<Problem> add(std::string_view name, const xla::ffi::AnyBuffer& buffer);

  // Shows the library a buffer without its last `rows` of the first dimension.
  void shorten(std::string_view name, std::int64_t rows);

  // The buffer of that name, or NULL.
  [[nodiscard]] const DLTensor* find(std::string_view name) const;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] void* data(std::string_view name) const;
  [[nodiscard]] std::size_t bytes(std::string_view name) const;

 private:
  struct Item {
    std::string_view name;
    DLTensor tensor{};
    std::array<std::int64_t, max_dims> shape{};
  };

  [[nodiscard]] Item* item(std::string_view name) const;

  DLDevice device_;
  int rank_;
  std::vector<std::unique_ptr<Item>> items_;  // tensors point into their items
};

// A struct of arguments whose tensors, and whose plan, are the buffers of their names, as far as
// there are such. Its numbers are those of _INIT.
template <class Args>
Args args_of(const Operands& operands) {
  Args args = xdpy::Fields<Args>::init;
  xdpy::for_each_field<Args>([&](const auto& field) {
    using Field = std::decay_t<decltype(field)>;
    if constexpr (Field::is_tensor()) args.*field.at = operands.find(field.name);
  });
  if constexpr (requires { args.plan; }) {
    args.plan = operands.data("plan");
    args.plan_bytes = operands.bytes("plan");
  }
  return args;
}

}  // namespace xdjax
