#include "ep/cuda/launch_plan.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/math.h"

namespace xd::ep::cuda {
namespace {

// Left to others when the library chooses: a caller's small kernels start while ours wait for
// peers.
constexpr int kReserve = 4;

// What one multiprocessor moves, and what a device's links carry, in GB/s (Hopper, NVLink 4). They
// decide on numbers of blocks only.
constexpr double kSmRate = 45.0, kLinkRate = 360.0;

// Multiprocessors that move rows as fast as the links carry those for other ranks, if rows go to
// all ranks alike; `slack`: over what that takes without any latency.
int sms_for_links(int ranks, double slack) {
  if (ranks == 1) return 64;  // local copies: as fast as many can
  return static_cast<int>(std::lround(kLinkRate / kSmRate * slack * ranks / (ranks - 1)));
}

int blocks_for(int wanted, int num_sms, int budget) {
  return std::clamp(num_sms > 0 ? num_sms : wanted, 1, budget);
}

// As many warps as there are shared memory for their stages, and threads in a block.
int mover_warps(std::uint64_t warp_bytes, const DeviceFacts& device) {
  const std::uint64_t room = device.shared_bytes - kStaticSharedBytes;
  return static_cast<int>(std::clamp<std::uint64_t>(room / warp_bytes, 1, kMostMoverWarps));
}

}  // namespace

int sm_budget(const Config& config, const DeviceFacts& device) {
  const int available = std::max(1, device.sms - kReserve);
  const int share = std::max(1, available / device.ranks_on_device);
  if (config.num_sms == 0) return share;
  XD_REQUIRE(config.num_sms <= device.sms, "config.num_sms = ", config.num_sms,
             ", expected at most the device's ", device.sms, " multiprocessors");
  XD_REQUIRE(config.num_sms * device.ranks_on_device <= device.sms,
             "config.num_sms = ", config.num_sms, " for each of ", device.ranks_on_device,
             " ranks on one device, expected at most ", device.sms / device.ranks_on_device,
             ": their kernels wait for one another and must fit together");
  return config.num_sms;
}

LaunchPlan plan_prepare(int experts, int ranks, int tokens, int budget, const DeviceFacts& device) {
  // A warp's tokens are numbered one step after another, so many warps; but every block sums up all
  // zones, and waits for all others.
  constexpr int kMost = 32, kTokensPerWarp = 8;
  constexpr int kTokensPerBlock = kPrepareWarps * kTokensPerWarp;
  const int wanted = std::clamp((tokens + kTokensPerBlock - 1) / kTokensPerBlock, 1, kMost);
  // Every warp's counters, and the first rows of all zones.
  const std::size_t words = kPrepareWarps * counter_columns(experts, ranks) + at(experts);
  return {.blocks = std::min({wanted + 1, budget, device.sms}),  // one for the plan's head
          .first_blocks = 0,
          .threads = kPrepareWarps * 32,
          .shared_bytes = words * sizeof(std::uint32_t)};
}

LaunchPlan plan_dispatch(const Traffic& traffic, const MoverPlan& send, const MoverPlan& fan_out,
                         int num_sms, int budget, const DeviceFacts& device) {
  const std::uint64_t warp_bytes = std::max(send.warp_bytes, fan_out.warp_bytes);
  const int warps = mover_warps(warp_bytes, device);
  // Few tokens: a warp for each, as latency counts.
  const int latency = traffic.tokens <= 512 ? (traffic.tokens + warps - 1) / warps : 0;
  const int sending = std::max(sms_for_links(traffic.ranks, 1.12), latency);
  const int wanted = traffic.receives ? 2 * sending : sending;
  LaunchPlan plan{.blocks = blocks_for(wanted, num_sms, budget)};
  plan.first_blocks = traffic.receives && plan.blocks > 1 ? (plan.blocks + 1) / 2 : plan.blocks;
  plan.threads = warps * 32;
  plan.shared_bytes = at(warps) * warp_bytes;
  return plan;
}

LaunchPlan plan_combine(const Traffic& traffic, int num_sms, int budget,
                        const DeviceFacts& device) {
  // Few tokens: several warps for each, as latency counts.
  const int latency = traffic.tokens <= 512 ? std::min(traffic.tokens / 4 + 1, 64) : 0;
  const int summing = std::max(sms_for_links(traffic.ranks, 1.5), latency);
  const int wanted = traffic.receives ? 2 * summing : summing;
  LaunchPlan plan{.blocks = std::min(blocks_for(wanted, num_sms, budget), device.sms)};
  // Partial sums take a little more than what follows.
  plan.first_blocks = (plan.blocks * 5 + 7) / 8;
  plan.threads = kCombineWarps * 32;
  return plan;
}

std::string explain(const char* operation, const LaunchPlan& plan, const Traffic& traffic,
                    int num_sms, int budget) {
  return concat(operation, ": ", plan.blocks, " multiprocessors (",
                num_sms > 0 ? "as configured" : "chosen", ", budget ", budget, "), ",
                plan.first_blocks, " begin with rows for peers, ", plan.threads / 32,
                " warps each, for ", traffic.tokens, " tokens of ", traffic.row_bytes, " bytes, ",
                traffic.ranks, " ranks", traffic.receives ? ", with local copies" : "",
                "; one multiprocessor moves ", kSmRate, " GB/s, the links carry ", kLinkRate);
}

}  // namespace xd::ep::cuda
