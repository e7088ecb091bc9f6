// An object of the C API that lives on a communicator: a group, or a context of products.
#pragma once

#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "arguments.h"
#include "comm.h"
#include "errors.h"

namespace xdpy {

// It keeps its communicator's object alive. Members are read and written with the GIL held.
template <class Handle, xd_status (*destroy)(Handle*)>
class Member {
 public:
  ~Member() {
    if (handle_ == nullptr) return;
    // Freeing CUDA memory may wait for kernels, and kernels may wait for ranks in other threads.
    without_gil([&] { return destroy(handle_); });
  }
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  void close() {
    if (calls_ != 0) {
      raise_invalid(
          (std::string("close: an operation of this ") + what_ + " is running in another thread")
              .c_str(),
          comm_.info().rank);
    }
    Handle* const handle = std::exchange(handle_, nullptr);
    check(without_gil([&] { return destroy(handle); }), comm_.failure());
  }
  [[nodiscard]] bool closed() const { return handle_ == nullptr; }
  [[nodiscard]] nb::object comm() const { return comm_object_; }
  [[nodiscard]] DLDevice device() const { return comm_.info().device; }
  [[nodiscard]] int num_ranks() const { return comm_.info().num_ranks; }

  // Runs a local call, which is no operation, without the GIL.
  template <class Fn>
  void call_local(Fn fn) {
    check(run(fn), comm_.failure());
  }

 protected:
  // `what`: a word for the object, for errors.
  Member(nb::object comm, const char* what)
      : comm_object_(std::move(comm)), comm_(nb::cast<Comm&>(comm_object_)), what_(what) {}

  // Runs fn(Handle*) -> xd_status, a call of the C API that may wait for a peer.
  template <class Fn>
  xd_status run(Fn fn) {
    Handle* const handle = usable();
    comm_.refuse_in_handler();
    const Comm::InUse comm_in_use(comm_);
    const InUse in_use(*this);
    return without_gil([&] { return fn(handle); });
  }

  [[nodiscard]] Handle* usable() const {
    if (handle_ == nullptr) {
      raise_invalid((std::string("this ") + what_ + " has been closed").c_str(), comm_.info().rank);
    }
    return handle_;
  }

  nb::object comm_object_;
  Comm& comm_;
  Handle* handle_ = nullptr;

 private:
  // While such an object lives a call may be running, on any thread, and close() refuses.
  class InUse {
   public:
    explicit InUse(Member& member) : member_(member) { ++member_.calls_; }
    ~InUse() { --member_.calls_; }
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

   private:
    Member& member_;
  };

  const char* what_;
  int calls_ = 0;
};

// A method of a member's class that takes the fields of an operation's struct, and `stream`, in a
// dict: a call with as many keywords takes a microsecond longer.
template <class Class, class Operation, class Handle, class Args>
auto method(Operation operation, xd_status (*function)(Handle*, const Args*, xd_stream)) {
  return [operation, function](Class& self, const nb::dict& fields) {
    const Given<Args> args(fields, self.device(), self.num_ranks());
    self.call(operation,
              [&](Handle* handle) { return function(handle, args.get(), args.stream()); });
  };
}

}  // namespace xdpy
