// Ranks meet through an NCCL communicator. NCCL's functions are found at run time: NCCL is needed
// neither to build this library nor to load it.
#pragma once

#include <crossdock/comm.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>

#include "meet/bootstrap.h"

namespace xd {

using NcclComm = void*;  // an ncclComm_t, the caller's

// The functions have the signatures of nccl.h since 2.14; results are an ncclResult_t.
struct NcclLibrary {
  static constexpr int kSuccess = 0;
  static constexpr int kInProgress = 7;
  static constexpr int kInt8 = 0;

  int (*comm_count)(NcclComm, int*) = nullptr;
  int (*comm_user_rank)(NcclComm, int*) = nullptr;
  int (*comm_cu_device)(NcclComm, int*) = nullptr;
  int (*comm_get_async_error)(NcclComm, int*) = nullptr;
  int (*all_gather)(const void*, void*, std::size_t, int, NcclComm, xd_stream) = nullptr;
  const char* (*get_error_string)(int) = nullptr;

  // Throws SYSTEM with the call's name and NCCL's reason.
  void check(int result, const char* call) const;
};

// Finds the functions first in what the process has loaded, since that has made the caller's
// communicator: among the symbols visible to all, or in a loaded library called `name`. Otherwise
// it loads the library of that name, and never unloads it. Throws UNSUPPORTED with what is missing.
NcclLibrary find_nccl(const char* name = "libnccl.so.2");

// A rank's place among the ranks of a communicator.
struct NcclRank {
  int rank = 0;
  int num_ranks = 0;
  int device = 0;  // CUDA device
};

// Reads the seat from config.nccl_comm. Throws INVALID_ARGUMENT where config.num_ranks > 0 and it
// or config.rank differs from NCCL's.
NcclRank read_nccl_rank(const NcclLibrary& nccl, const xd_comm_config& config);

// Tells whether the caller still waits. A caller that gives up may destroy the communicator, so the
// communicator is used only under the mutex.
struct NcclPatience {
  std::mutex mutex;
  bool given_up = false;
};

// Returns true when `landed` says that the enqueued work has happened; false when the caller has
// given up. Throws SYSTEM if the communicator has failed. Never blocks inside NCCL.
bool wait_for_nccl(const NcclLibrary& nccl, NcclComm comm, const std::function<bool()>& landed,
                   NcclPatience& patience);

// A bootstrap through config.nccl_comm, which must not be null. The communicator stays the
// caller's, and the caller uses it for nothing else meanwhile. Throws UNSUPPORTED in builds without
// CUDA and on machines without its driver or without NCCL.
std::unique_ptr<Bootstrap> bootstrap_by_nccl(const xd_comm_config& config);

}  // namespace xd
