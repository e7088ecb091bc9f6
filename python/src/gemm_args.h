// The arguments of a product, and the bounds of a context, from Python's keyword arguments.
#pragma once

#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "arguments.h"

namespace xdpy {

// The tokens of each rank, from a sequence of `num_ranks` integers; none from None.
class TokensPerRank {
 public:
  void read(nb::handle sequence, int num_ranks);
  // NULL for None.
  [[nodiscard]] const std::int64_t* get() const { return given_ ? tokens_.data() : nullptr; }

 private:
  bool given_ = false;
  std::vector<std::int64_t> tokens_;
};

// xd_gemm_args, whose fields are named as keyword arguments are. It lives as long as the call.
class GemmArgs {
 public:
  // TypeError for a name that does not exist. Leaves out the argument `stream`.
  GemmArgs(const nb::dict& given, DLDevice device, int num_ranks);
  GemmArgs(const GemmArgs&) = delete;
  GemmArgs& operator=(const GemmArgs&) = delete;

  [[nodiscard]] const xd_gemm_args* get() const { return &args_; }

 private:
  static constexpr std::size_t most_tensors = 14;

  bool read_tensor(const char* name, nb::handle value, DLDevice device);
  bool read_number(const char* name, nb::handle value);

  xd_gemm_args args_ XD_GEMM_ARGS_INIT;
  std::array<std::optional<Tensor>, most_tensors> tensors_;
  TokensPerRank tokens_;
};

// The bounds of a context; dtype as data_type() takes it. TypeError for a name that does not exist.
xd_gemm_config gemm_config(const nb::kwargs& options);

// A dict with the names of xd_gemm_status; the status is its name.
nb::dict fields_of(const xd_gemm_status& status);

// A dict with the names of xd_gemm_plan_info.
nb::dict fields_of(const xd_gemm_plan_info& info);

}  // namespace xdpy
