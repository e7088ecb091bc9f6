// Expert-parallel groups: the operations of crossdock/ep.h on described tensors.
#pragma once

#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "errors.h"
#include "member.h"

namespace xdpy {

class Group : public Member<xd_ep_group, xd_ep_group_destroy> {
 public:
  Group(nb::object comm, const nb::kwargs& options);

  // Reads and clears the state of non-fatal errors.
  [[nodiscard]] nb::dict status() const;

  // The group's counters so far.
  [[nodiscard]] nb::dict stats() const;
  void set_name(const std::string& name) const;

  // The number of operations that have ended with a non-fatal error.
  [[nodiscard]] std::uint64_t errors() const;

  // Runs fn(xd_ep_group*) -> xd_status, one operation, without the GIL.
  template <class Fn>
  void call(xd_ep_operation operation, Fn fn) {
    const xd_status status = run(fn);
    if (status != XD_SUCCESS) fail(operation, status);
  }

 private:
  [[noreturn]] void fail(xd_ep_operation operation, xd_status status) const;
};

void bind_group(nb::module_& module);

// Adds the methods of crossdock/low_latency.h.
void bind_low_latency(nb::class_<Group>& group);

}  // namespace xdpy
