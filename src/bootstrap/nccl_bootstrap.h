// Ranks meet through an NCCL communicator. CUDA only.
#pragma once

#include <memory>

#include "bootstrap/bootstrap.h"
#include "bootstrap/nccl_library.h"

namespace xd {

// The communicator stays the caller's, and the caller uses it for nothing else meanwhile.
std::unique_ptr<Bootstrap> meet_by_nccl(const NcclLibrary& nccl, NcclComm comm,
                                        const NcclSeat& seat);

}  // namespace xd
