// The measurement of products on CUDA devices.
#pragma once

#include "../gemm/run.h"
#include "../table.h"

namespace bench::gpu {

// The devices and the libraries that are measured beside, for the head of a file of results.
Json describe_gemm();

// Ranks go to devices in turn. Collective. The results are complete on rank 0 and empty on the
// others. Ways:
//   product alone        cuBLASLt, by the fastest of its algorithms, on all ranks at once
//   transfer alone       NCCL's collective
//   one after the other  both, on one stream
//   AUTO ..              the library's, by calls; "AUTO, graph" .. replayed as a CUDA graph
// Without NCCL, or where ranks share devices, the two ways with it are left out.
GemmResults run_gemm(const Launch& launch, int rank, const GemmProblem& problem);

}  // namespace bench::gpu
