// Expert-parallel groups: the operations of crossdock/ep.h on described tensors.
#pragma once

#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>

#include <cstdint>

#include "comm.h"
#include "errors.h"

namespace xdpy {

// A group keeps its communicator's object alive. Members are read and written with the GIL held.
class Group {
 public:
  Group(nb::object comm, const nb::kwargs& options);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void close();
  [[nodiscard]] bool closed() const { return group_ == nullptr; }
  [[nodiscard]] nb::object comm() const { return comm_object_; }

  // Reads and clears the state of non-fatal errors.
  [[nodiscard]] nb::dict status() const;

  // The number of operations that have ended with a non-fatal error.
  [[nodiscard]] std::uint64_t errors() const;

  [[nodiscard]] DLDevice device() const { return comm_.info().device; }

  // Runs fn(xd_ep_group*) -> xd_status, one operation, without the GIL.
  template <class Fn>
  void call(xd_ep_operation operation, Fn fn) {
    const xd_status status = run(fn);
    if (status != XD_SUCCESS) fail(operation, status);
  }

  // Runs a local call, which is no operation, in the same way.
  template <class Fn>
  void call_local(Fn fn) {
    check(run(fn), comm_.failure());
  }

 private:
  // While such an object lives a call may be running, on any thread, and close() refuses.
  class InUse {
   public:
    explicit InUse(Group& group) : group_(group) { ++group_.calls_; }
    ~InUse() { --group_.calls_; }
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

   private:
    Group& group_;
  };

  template <class Fn>
  xd_status run(Fn fn) {
    xd_ep_group* const group = usable();
    comm_.refuse_in_handler();
    const Comm::InUse comm_in_use(comm_);
    const InUse in_use(*this);
    return without_gil([&] { return fn(group); });
  }

  [[nodiscard]] xd_ep_group* usable() const;
  [[noreturn]] void fail(xd_ep_operation operation, xd_status status) const;

  nb::object comm_object_;
  Comm& comm_;
  xd_ep_group* group_ = nullptr;
  int calls_ = 0;
};

void bind_group(nb::module_& module);

// Adds the methods of crossdock/low_latency.h.
void bind_low_latency(nb::class_<Group>& group);

}  // namespace xdpy
