// Memory and threads for oneDNN, which ends the process where it gets none: its OpenMP runtime
// exits without a thread, and code is generated into no memory.
#pragma once

namespace xd::gemm::cpu {

// Tries whether there is memory for what oneDNN makes once. Throws OUT_OF_MEMORY.
void require_memory();

// Tries whether products of this thread can have so many threads, itself included, and memory
// likewise. Throws SYSTEM or OUT_OF_MEMORY. Threads and memory that this thread has had before are
// not tried again. A limit that others reach between the trial and the product is not noticed.
void require_limits(int threads);

}  // namespace xd::gemm::cpu
