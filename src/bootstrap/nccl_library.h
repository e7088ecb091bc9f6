// NCCL's functions, found at run time: nothing of it is needed to build this library or to load it.
#pragma once

#include <crossdock/comm.h>

#include <cstddef>
#include <functional>
#include <mutex>

namespace xd {

using NcclComm = void*;  // an ncclComm_t, the caller's

// As nccl.h has them since 2.14; results are an ncclResult_t.
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

// From what the process has loaded already, since that made the caller's communicator: visible to
// all, or a library called `name`; else from the library of that name. It is never unloaded. Throws
// UNSUPPORTED with what is missing.
NcclLibrary find_nccl(const char* name = "libnccl.so.2");

// A rank's place among the ranks of a communicator.
struct NcclSeat {
  int rank = 0;
  int num_ranks = 0;
  int device = 0;  // of CUDA
};

// Of config.nccl_comm. Throws INVALID_ARGUMENT where config.num_ranks > 0 and it or config.rank
// says otherwise.
NcclSeat read_seat(const NcclLibrary& nccl, const xd_comm_config& config);

// Whether somebody still waits. Who gives up may destroy the communicator then: it is looked at
// under the mutex only.
struct NcclPatience {
  std::mutex mutex;
  bool given_up = false;
};

// True when what was enqueued has happened, as `landed` says; false when it has been given up.
// Throws SYSTEM if the communicator has failed. Never blocks inside NCCL.
bool wait_for_nccl(const NcclLibrary& nccl, NcclComm comm, const std::function<bool()>& landed,
                   NcclPatience& patience);

}  // namespace xd
