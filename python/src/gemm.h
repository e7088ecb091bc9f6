// Contexts of products: the operations of crossdock/gemm.h on described tensors.
#pragma once

#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "member.h"

namespace xdpy {

class GemmContext : public Member<xd_gemm_context, xd_gemm_context_destroy> {
 public:
  GemmContext(nb::object comm, const nb::kwargs& options);

  // Reads and clears the state of non-fatal errors.
  [[nodiscard]] nb::dict status() const;

  // The context's counters so far.
  [[nodiscard]] nb::dict stats() const;
  void set_name(const std::string& name) const;

  // The number of operations that have ended with a non-fatal error.
  [[nodiscard]] std::uint64_t errors() const;

  // Where the rows lie that the last all_gather has left in the context.
  [[nodiscard]] nb::dict gathered() const;

  // Runs fn(xd_gemm_context*) -> xd_status, one operation, without the GIL.
  template <class Fn>
  void call(xd_gemm_operation operation, Fn fn) {
    const xd_status status = run(fn);
    if (status != XD_SUCCESS) fail(operation, status);
  }

 private:
  [[noreturn]] void fail(xd_gemm_operation operation, xd_status status) const;
};

void bind_gemm(nb::module_& module);

}  // namespace xdpy
