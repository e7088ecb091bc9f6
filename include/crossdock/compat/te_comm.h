/* Crossdock: the communicators that TransformerEngine's functions are given. C++17. */
#ifndef CROSSDOCK_COMPAT_TE_COMM_H_
#define CROSSDOCK_COMPAT_TE_COMM_H_

#include <crossdock/comm.h>
#include <crossdock/compat/te_error.h>
#include <stdint.h>

/* Of NCCL; declared alike there. */
typedef struct ncclComm* ncclComm_t;

namespace crossdock::te {

/* A communicator of Crossdock's in the place of NCCL's, for ranks on the CPU and for programs
 * without NCCL. It stays the caller's, who destroys it after what was made of it. */
inline ncclComm_t as_nccl(xd_comm* comm) {
  /* NCCL's own are at even addresses. */
  return comm != nullptr ? reinterpret_cast<ncclComm_t>(reinterpret_cast<char*>(comm) + 1)
                         : nullptr;
}

namespace detail {

/* A communicator that lives until close(), and is the caller's or this object's. Trivial, so that a
 * static one is not destroyed behind the program's back. */
struct Comm {
  xd_comm* comm;
  bool owned;
  int rank, num_ranks;
  DLDevice device;

  /* Collective. `given` is as_nccl's, or NCCL's. */
  void open(const char* function, void* given) {
    require(given != nullptr, std::string(function) + ": comm = NULL, expected a communicator");
    owned = (reinterpret_cast<uintptr_t>(given) & 1u) == 0;
    if (owned) {
      xd_comm_config config = XD_COMM_CONFIG_INIT;
      config.bootstrap = XD_BOOTSTRAP_NCCL;
      config.nccl_comm = given;
      config.device = {kDLCUDA, -1};
      check(function, xd_comm_create(&config, &comm));
    } else {
      comm = reinterpret_cast<xd_comm*>(static_cast<char*>(given) - 1);
    }
    xd_comm_info info = XD_COMM_INFO_INIT;
    check(function, xd_comm_get_info(comm, &info));
    rank = info.rank;
    num_ranks = info.num_ranks;
    device = info.device;
  }

  void close() {
    if (owned) xd_comm_destroy(comm);
    comm = nullptr;
    owned = false;
  }
};

}  // namespace detail
}  // namespace crossdock::te

#endif /* CROSSDOCK_COMPAT_TE_COMM_H_ */
