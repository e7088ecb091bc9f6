#include "meet/nccl/library.h"

#include <dlfcn.h>

#include <chrono>
#include <string>
#include <thread>

#include "base/error.h"
#include "meet/messages.h"

namespace xd {
namespace {

constexpr auto kLookAgain = std::chrono::microseconds(100);

// The handle with which dlsym() finds NCCL. RTLD_DEFAULT is NULL, so no handle means "nowhere".
void* locate(const char* name) {
  if (::dlsym(RTLD_DEFAULT, "ncclCommCount") != nullptr) return RTLD_DEFAULT;
  if (void* const loaded = ::dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  if (void* const opened = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return opened;
  const char* const reason = ::dlerror();
  fail(XD_ERROR_UNSUPPORTED, "config.bootstrap = XD_BOOTSTRAP_NCCL: this process has no NCCL: ",
       reason != nullptr ? reason : name);
}

template <class Function>
void look_up(void* handle, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
  if (function == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
}

}  // namespace

void NcclLibrary::check(int result, const char* call) const {
  if (result == kSuccess) return;
  fail(XD_ERROR_SYSTEM, call, ": ", get_error_string(result), " (NCCL result ", result, ")");
}

NcclLibrary find_nccl(const char* name) {
  void* const handle = locate(name);
  NcclLibrary nccl;
  std::string missing;
  look_up(handle, "ncclCommCount", nccl.comm_count, missing);
  look_up(handle, "ncclCommUserRank", nccl.comm_user_rank, missing);
  look_up(handle, "ncclCommCuDevice", nccl.comm_cu_device, missing);
  look_up(handle, "ncclCommGetAsyncError", nccl.comm_get_async_error, missing);
  look_up(handle, "ncclAllGather", nccl.all_gather, missing);
  look_up(handle, "ncclGetErrorString", nccl.get_error_string, missing);
  if (!missing.empty())
    fail(XD_ERROR_UNSUPPORTED, "config.bootstrap = XD_BOOTSTRAP_NCCL: this process's NCCL has no ",
         missing);
  return nccl;
}

NcclRank read_nccl_rank(const NcclLibrary& nccl, const xd_comm_config& config) {
  NcclRank self;
  nccl.check(nccl.comm_count(config.nccl_comm, &self.num_ranks), "ncclCommCount");
  nccl.check(nccl.comm_user_rank(config.nccl_comm, &self.rank), "ncclCommUserRank");
  nccl.check(nccl.comm_cu_device(config.nccl_comm, &self.device), "ncclCommCuDevice");
  XD_REQUIRE(self.num_ranks >= 1 && self.num_ranks <= kMaxRanks, "config.nccl_comm has ",
             self.num_ranks, " ranks, expected 1 to ", kMaxRanks);
  XD_REQUIRE(self.rank >= 0 && self.rank < self.num_ranks, "config.nccl_comm is rank ", self.rank,
             " of ", self.num_ranks);
  XD_REQUIRE(config.num_ranks == 0 || config.num_ranks == self.num_ranks,
             "config.num_ranks = ", config.num_ranks, ", expected 0 or the ", self.num_ranks,
             " of config.nccl_comm");
  XD_REQUIRE(config.num_ranks == 0 || config.rank == self.rank, "config.rank = ", config.rank,
             ", expected ", self.rank, " as in config.nccl_comm");
  return self;
}

bool wait_for_nccl(const NcclLibrary& nccl, NcclComm comm, const std::function<bool()>& landed,
                   NcclPatience& patience) {
  for (;;) {
    {
      const std::lock_guard lock(patience.mutex);
      if (patience.given_up) return false;
      int state = NcclLibrary::kSuccess;
      nccl.check(nccl.comm_get_async_error(comm, &state), "ncclCommGetAsyncError");
      // A non-blocking communicator enqueues later: until it has, the stream is idle.
      if (state != NcclLibrary::kInProgress) {
        nccl.check(state, "ncclAllGather");
        if (landed()) return true;
      }
    }
    std::this_thread::sleep_for(kLookAgain);
  }
}

}  // namespace xd
