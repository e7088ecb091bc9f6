// One rank's membership in a set of ranks, as a Python object.
#pragma once

#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"

namespace xdpy {

// It is destroyed with its last reference, by close(), or at the interpreter's exit, at the first
// of these. Members are read and written with the GIL held.
class Comm {
 public:
  struct Options {
    std::string bootstrap;
    int rank = 0;
    int num_ranks = 0;
    nb::object unique_id;   // bytes or None
    nb::object all_gather;  // callable or None
    std::uintptr_t nccl_comm = 0;
    int device_type = kDLCPU;
    int device_id = 0;
    std::size_t heap_bytes = 0;
    int timeout_ms = 0;
    std::string name;
    int on_peer_loss = XD_COMM_PEER_LOSS_FATAL;
    std::optional<std::string> host;
    std::optional<std::string> net_interface;
    int silence_ms = 0;
    std::vector<int> global_ranks;  // empty = none
    bool elastic = false;
  };

  // Blocks until all ranks have come.
  explicit Comm(const Options& options);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  void close();
  void abort() const;
  void barrier() const;
  nb::list all_gather(const nb::bytes& data) const;
  [[nodiscard]] nb::bytes invite() const;
  [[nodiscard]] nb::object error() const;  // dict, or None
  [[nodiscard]] nb::tuple lost() const;    // ranks, ascending
  // The fields of crossdock.View.
  [[nodiscard]] nb::dict agree(std::int64_t step, bool ok, bool leave,
                               const std::vector<int>& leave_out, int timeout_ms,
                               std::uintptr_t stream) const;
  [[nodiscard]] nb::dict view() const;
  [[nodiscard]] bool closed() const { return comm_ == nullptr; }
  [[nodiscard]] const xd_comm_info& info() const { return info_; }

  [[nodiscard]] std::uintptr_t allocate(std::size_t bytes) const;
  void free(std::uintptr_t address) const;
  void grow(std::size_t bytes) const;
  [[nodiscard]] nb::dict memory() const;
  [[nodiscard]] int register_memory(std::uintptr_t address, std::size_t bytes) const;
  void deregister_memory(int registration) const;
  [[nodiscard]] nb::tuple export_handle(std::uintptr_t address) const;
  [[nodiscard]] std::uintptr_t import_handle(int rank, int segment, std::uint64_t offset) const;
  void copy(std::uintptr_t to, int rank, int segment, std::uint64_t offset, std::size_t bytes,
            std::uintptr_t stream) const;

  // The communicator for a call; throws if it has been closed.
  [[nodiscard]] xd_comm* usable() const;
  [[nodiscard]] Failure failure() const { return {.comm = comm_, .rank = info_.rank}; }

  // Runs fn(xd_comm*) -> xd_status, a call of the C API on this communicator, without the GIL.
  template <class Fn>
  void call(Fn fn) const {
    xd_comm* const comm = usable();
    refuse_in_handler();
    const InUse in_use(*this);
    check(without_gil([&] { return fn(comm); }), failure());
  }

  // Throws in a signal handler that runs while this thread waits in a call on this communicator:
  // the two would wait for each other.
  void refuse_in_handler() const;

  // While such an object lives a call may be waiting, on any thread, and close() refuses.
  class InUse {
   public:
    explicit InUse(const Comm& comm) : comm_(comm) { ++comm_.calls_; }
    ~InUse() { --comm_.calls_; }
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

   private:
    const Comm& comm_;
  };

 private:
  xd_comm* comm_ = nullptr;
  xd_comm_info info_ XD_COMM_INFO_INIT;
  mutable int calls_ = 0;
};

void bind_comm(nb::module_& module);

}  // namespace xdpy
