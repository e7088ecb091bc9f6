// A low-latency group's part in operations with ranks on other machines: its links, the thread that
// has them, and the memory that kernels use for them. docs/internals/low_latency_machines.md has
// the protocol.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/remote/links.h"
#include "cuda/memory.h"
#include "ep/plan/cuda/launch_shape.h"
#include "ep/proxied.h"
#include "ep/slots/cuda/remote/params.h"
#include "ep/slots/group.h"
#include "net/proxy.h"

namespace xd::ep::cuda {

class LlRemoteGroup {
 public:
  // Collective. `areas`: of near ranks, by rank; `map`: of all of them.
  LlRemoteGroup(const LlGroup& group, std::span<const HeapRange> areas, const LlWordsMap& map);
  // No kernel of the group runs any more. Peers may still be in its last operation, so it stays
  // until they have read this rank's messages, for a few seconds at most; where they have not then,
  // it keeps the links for good.
  ~LlRemoteGroup();
  LlRemoteGroup(const LlRemoteGroup&) = delete;
  LlRemoteGroup& operator=(const LlRemoteGroup&) = delete;

  // While the group is made: remote ranks' credits are there for good, as what they send is stored
  // here by this rank's own kernels, one behind the other.
  void give_credits(const LlDevice& group, cudaStream_t stream) const;
  // Loads the kernels of largest launches of those shapes, and checks that the device holds them.
  void load(const LlDevice& group, const LaunchShape& dispatch, std::size_t shared_bytes,
            const LaunchShape& combine);

  // Enqueues a call: the near kernels in halves, and the carrier between them (carrier.cuh).
  // `shape`: of a launch of the near kernel. Sets `entered` as DeviceRunner::run(); changes params.
  using ShapeOf = std::function<LaunchShape(const LlStep& step)>;
  void enqueue(LlGivenParams& params, const ShapeOf& shape, bool& entered,
               cudaStream_t stream) const;
  void enqueue(LlCombineParams& params, const ShapeOf& shape, bool& entered,
               cudaStream_t stream) const;

 private:
  void allocate(const LlWordsMap& map);
  void describe(std::span<const HeapRange> areas, const LlWordsMap& map, int in_flight);
  net::FrameWords words() const;
  void read_all() const;
  bool is_over() const;
  void linger() const noexcept;
  // The table of areas that near kernels of a pipeline have, in device memory: a remote rank's is
  // this rank's own in dispatch, and a stand-in in combine.
  const HeapRange* areas(int pipeline) const {
    return areas_.as<HeapRange>() + static_cast<std::size_t>(pipeline * num_ranks_);
  }
  LlRemoteState* state() const { return state_.as<LlRemoteState>(); }
  void launch_carrier(const LlDevice& group, const LlCarry& step, cudaStream_t stream) const;
  template <class LaunchHalf>
  void enqueue_halves(const LlDevice& group, const LlStep& step, LlCarry carry,
                      LaunchHalf&& launch_half, bool& entered, cudaStream_t stream) const;

  Comm& comm_;
  const int num_ranks_;
  const std::vector<int> ranks_;  // the neighbours: all ranks on other machines
  const net::LinkMap map_;
  LaunchShape carrier_;
  // A combine has failed on the host: peers may have sent weights that nobody has read.
  mutable std::atomic<bool> may_leave_weights_{false};
  Proxied proxied_;
  xd::cuda::PinnedBlock frames_, words_;
  xd::cuda::DeviceBuffer state_, stand_ins_, areas_, table_;
  std::unique_ptr<RemoteLinks> links_;
  std::unique_ptr<net::Proxy> proxy_;  // uses all of the above
};

}  // namespace xd::ep::cuda
