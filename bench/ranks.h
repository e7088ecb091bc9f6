// Ranks of a launch by crossdock-run: processes, or threads of one process.
#pragma once

#include <crossdock/crossdock.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace bench {

// Throws std::runtime_error with the library's text.
void ok(xd_status status);

struct DestroyComm {
  void operator()(xd_comm* comm) const { xd_comm_destroy(comm); }
};
using Comm = std::unique_ptr<xd_comm, DestroyComm>;

struct DestroyGroup {
  void operator()(xd_ep_group* group) const { xd_ep_group_destroy(group); }
};
using Group = std::unique_ptr<xd_ep_group, DestroyGroup>;

struct DestroyLlGroup {
  void operator()(xd_ll_group* group) const { xd_ll_group_destroy(group); }
};
using LlGroup = std::unique_ptr<xd_ll_group, DestroyLlGroup>;

struct Launch {
  int num_ranks;
  bool threads;
  int first_rank;  // this process's first
};

// True in a process that crossdock-run has started.
bool is_launched();

// Reads the launch from the environment; throws std::runtime_error if crossdock-run has not started
// it.
Launch read_launch();

// Runs body(rank) for every rank of this process, each on its own thread, and returns how many
// failed; each failure is one line on standard error.
int run_ranks(const Launch& launch, const std::function<void(int rank)>& body);

struct CommOptions {
  const char* name;  // keeps apart the communicators that meet one after another
  std::size_t heap_bytes;
  DLDevice device{kDLCPU, 0};
  const xd_unique_id* unique_id = nullptr;  // without one, ranks meet through the environment
  int timeout_ms = 60000;
};

// Collective.
Comm make_comm(const Launch& launch, int rank, const CommOptions& options);

// Throws std::runtime_error if the communicator has met an error or, by what `get` says, `group`.
template <class Group, class Status>
void check_status(xd_comm* comm, Group* group, xd_status (*get)(Group*, Status*), Status status) {
  xd_error_info error = XD_ERROR_INFO_INIT;
  ok(xd_comm_error(comm, &error));
  const bool fatal = error.status != XD_SUCCESS;
  if (!fatal) ok(get(group, &status));
  const xd_status met = fatal ? error.status : status.status;
  if (met == XD_SUCCESS) return;
  throw std::runtime_error(std::string(xd_status_name(met)) + ": " +
                           (fatal ? error.text : status.text));
}

}  // namespace bench
