// Captures operations as CUDA graphs, to replay them, and to see how many multiprocessors they
// take.
#pragma once

#include <vector>

#include "ep_rank.h"

namespace bench::gpu {

// One operation, a graph for each combination of tensor copies.
class Captured {
 public:
  Captured(EpRank& rank, Operation operation, const Stream& stream);
  ~Captured();
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;

  void launch(int iteration) const;

 private:
  const Stream& stream_;
  std::vector<cudaGraphExec_t> graphs_;
};

// Blocks of the operation's largest kernel, of which a multiprocessor has one; 0 = not known.
int blocks_of(EpRank& rank, Operation operation, const Stream& stream);

}  // namespace bench::gpu
