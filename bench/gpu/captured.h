// Captures operations as CUDA graphs, to replay them, and to see how many multiprocessors they
// take.
#pragma once

#include <functional>
#include <string>
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

// Blocks of the largest kernel that `enqueue` puts on the stream, of which a multiprocessor has
// one; 0 = not known. It is captured, not run. `name` is for the text of a failure.
int blocks_of(const std::string& name, const std::function<void()>& enqueue, const Stream& stream);

}  // namespace bench::gpu
