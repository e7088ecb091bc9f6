// The launches of which a call is made where ranks are on other machines:
//
//   call            launches
//   send half       near kernel, carrier: posts
//   receive half    carrier: lands, near kernel; with bad arguments it gives up instead
//   both halves     send half, which opens, and receive half, which follows, with one carrier
//   that has failed near kernel, carrier: posts
//
// In front of the send half of a combine with weights comes a carrier that carries these.
#include <algorithm>

#include "base/math.h"
#include "cuda/error.h"
#include "ep/slots/cuda/remote/group.h"
#include "ep/slots/cuda/remote/kernels.h"

namespace xd::ep::cuda {

void LlRemoteGroup::give_credits(const LlDevice& group, cudaStream_t stream) const {
  static constexpr std::uint64_t kAll = std::uint64_t{1} << 62;
  static constexpr turn::PipelineCredit kForGood{kAll, kAll};
  for (const turn::PipelineMap& pipeline : group.map.pipeline) {
    for (const int r : ranks_) {
      XD_CUDA_CHECK(cudaMemcpyAsync(group.own_area + pipeline.credit + at(r) * sizeof(kForGood),
                                    &kForGood, sizeof(kForGood), cudaMemcpyHostToDevice, stream));
    }
  }
}

void LlRemoteGroup::load(const LlDevice& group, const LaunchShape& dispatch,
                         std::size_t shared_bytes, const LaunchShape& combine) {
  carrier_ = {.blocks = std::min(group.most_blocks, kLlMostCarriers),
              .first_blocks = 0,
              .threads = kLlCarrierThreads,
              .shared_bytes = 0};
  load_ll_remote_dispatch(group, dispatch, shared_bytes);
  load_ll_remote_combine(combine);
  load_ll_carrier(carrier_);
}

void LlRemoteGroup::launch_carrier(const LlDevice& group, const LlCarry& step,
                                   cudaStream_t stream) const {
  LaunchShape shape = carrier_;
  if (step.weights) shape.blocks = 1;
  launch(LlCarryParams{.group = group, .remote = table_.as<LlRemoteDevice>(), .step = step}, shape,
         stream);
}

// A call that has failed receives nothing, whatever its halves.
template <class LaunchHalf>
void LlRemoteGroup::enqueue_halves(const LlDevice& group, const LlStep& step, LlCarry carry,
                                   LaunchHalf&& launch_half, bool& entered,
                                   cudaStream_t stream) const {
  const bool receives = step.receive && !step.failed;
  carry.whole = step.send && receives;
  if (carry.weights) launch_carrier(group, carry, stream);
  carry.weights = false;
  LlStep half = step;
  if (step.send) {
    half.receive = step.receive && step.failed;
    launch_half(half, carry.whole ? LlGuard::opens : LlGuard::none);
    entered = true;
  }
  carry.posts = step.send;
  carry.lands = receives && !step.silent;
  carry.gives_up = receives && step.silent;
  launch_carrier(group, carry, stream);
  if (!receives) return;
  half.send = false;
  half.receive = true;
  launch_half(half, carry.whole ? LlGuard::follows : LlGuard::none);
  entered = true;
}

void LlRemoteGroup::enqueue(LlGivenParams& params, const ShapeOf& shape, bool& entered,
                            cudaStream_t stream) const {
  params.group.areas = areas(kLlDispatch);
  const std::uint64_t bytes = params.form.payload() + std::uint64_t{params.form.tail_words()} * 8;
  LlCarry carry{};
  carry.kind = kLlDispatch;
  carry.item_bytes = static_cast<std::uint32_t>(round_up(bytes, 16));
  carry.wait_ns = params.wait_ns;
  const auto launch_half = [&](const LlStep& half, LlGuard guard) {
    params.step = half;
    const LaunchShape launched = shape(half);
    launch(LlRemoteDispatchParams{params, {guard, state()}}, launched, stream);
  };
  const LlDevice group = params.group;
  enqueue_halves(group, LlStep{params.step}, carry, launch_half, entered, stream);
}

void LlRemoteGroup::enqueue(LlCombineParams& params, const ShapeOf& shape, bool& entered,
                            cudaStream_t stream) const {
  params.group.areas = areas(kLlCombine);
  const LlStep step = params.step;
  const bool has_weights = (params.record.flags & kWeighted) != 0;
  params.route.quick = false;  // a launch of both halves
  if (has_weights || step.failed) may_leave_weights_.store(true, std::memory_order_relaxed);
  LlCarry carry{};
  carry.kind = kLlCombine;
  carry.weights = step.send && !step.failed && has_weights;
  carry.item_bytes = params.row_bytes;
  carry.plan = params.plan;
  carry.topk_weights = params.topk_weights;
  carry.tokens = static_cast<std::uint32_t>(params.weight_rows);
  carry.topk = static_cast<std::uint32_t>(params.weight_cols);
  carry.wait_ns = params.wait_ns;
  const auto launch_half = [&](const LlStep& half, LlGuard guard) {
    params.step = half;
    LlRemoteCombineParams remote{};
    remote.call = remote.unfit = params;
    remote.checks_out = guard == LlGuard::opens;
    remote.guarded = {guard, state()};
    // The near kernels look at `out` in receive halves. Weights of other rows than the plan's are
    // the same mistake.
    remote.unfit.record.flags |= kWeighted;
    remote.unfit.weight_rows = params.out_rows;
    remote.unfit.weight_cols = 0;
    launch(remote, shape(half), stream);
  };
  const LlDevice group = params.group;
  enqueue_halves(group, step, carry, launch_half, entered, stream);
}

}  // namespace xd::ep::cuda
