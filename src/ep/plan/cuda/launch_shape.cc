#include "ep/plan/cuda/launch_shape.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/math.h"

namespace xd::ep::cuda {
namespace {

// The library chooses at most this many, about half of a Hopper GPU. The rest is the caller's, or
// another group's.
constexpr int kMostChosen = 64;

// Rates in GB/s (Hopper, NVLink 4): rows that one multiprocessor stores by bulk copies, rows that
// it reads and writes where it sums or scales, and bytes that a device's links carry. They decide
// on numbers of blocks only.
constexpr double kStoreRate = 45.0, kSumRate = 60.0, kLinkRate = 360.0;
// Rows that one multiprocessor quantises, in bytes read.
constexpr double kQuantiseRate = 28.0;

// Numbers per token, if choices fall on all ranks alike.
struct RowsPerToken {
  double ranks;      // ranks that hold some of its experts
  double remote;     // such ranks but its own
  double delivered;  // rows in receive tensors
};

RowsPerToken rows_per_token(const Traffic& traffic) {
  const double others = 1.0 - 1.0 / traffic.ranks;
  const double ranks = traffic.ranks * (1.0 - std::pow(others, traffic.topk));
  return {ranks, ranks * others, traffic.row_per_expert ? double(traffic.topk) : ranks};
}

// The number of multiprocessors that move `moves` rows a token, each at `rate`, while the links
// carry the rows for other ranks. `slack` is the factor over the number that would do without any
// latency.
int sms_for_links(double moves, double remote, double rate, double slack) {
  if (remote == 0.0) return kMostChosen;  // local copies scale with the multiprocessors
  const double sms = kLinkRate / rate * slack * moves / remote;
  return static_cast<int>(std::lround(std::min(sms, double{kMostChosen})));
}

// Rows that are moved per token by the blocks that begin with sending (dispatch) or with partial
// sums (combine), and by the others. `filling`: that many blocks of the former fill the links.
struct Division {
  double first, other;
  int filling;
};

// The sender puts this rank's own rows into all their places at once. A peer's row arrives in the
// first of its places, and is copied from there to the others, or out of staging memory to all.
// Rows that are scaled arrive from peers alone, once for each, and are all written at the owner.
Division division_of_dispatch(const RowsPerToken& rows, const Traffic& traffic) {
  if (!traffic.receives) return {1.0, 0.0, 0};
  const double own = traffic.scaled ? 0.0 : rows.delivered / traffic.ranks;
  const double sent = rows.remote + own;
  const double copied =
      traffic.scaled ? rows.delivered : rows.delivered - own - (traffic.staged ? 0.0 : rows.remote);
  return {sent, copied, sms_for_links(sent, rows.remote, kStoreRate, 1.0)};
}

// Where sums are codes, arithmetic decides: to put a row into codes takes as long as to add one up
// from codes, and a link carries two of them in the time of a row. By rank a rank's own rows are
// put into codes and back where they are added up.
Division division_of_codes(const RowsPerToken& rows, const Traffic& traffic) {
  const double pushed = traffic.row_per_expert ? rows.delivered + rows.ranks : rows.remote;
  const double own = traffic.row_per_expert ? 0.0 : rows.ranks - rows.remote;
  return {pushed, rows.ranks + own, sms_for_links(2.0 * pushed, rows.remote, kSumRate, 1.0)};
}

// A rank's rows are read, and their sums written for the token's rank, which reads them again. By
// rank a sum is a copy of one row, so fewer blocks fill the links than the division gives.
Division division_of_combine(const RowsPerToken& rows, const Traffic& traffic) {
  if (traffic.coded) return division_of_codes(rows, traffic);
  const double pushed = rows.delivered + rows.ranks;
  const int filling =
      traffic.row_per_expert ? sms_for_links(pushed, rows.remote, kSumRate, 1.0) : 0;
  return {pushed, rows.ranks + 1.0, filling};
}

// How many tokens get a warp of their own: all of them up to 512, where latency dominates; fewer
// beyond, none from 1,024 on.
int tokens_at_once(int tokens) {
  constexpr int kMost = 512;
  return std::clamp(2 * kMost - tokens, 0, tokens);
}

int blocks_for(int wanted, int num_sms, int budget) {
  return std::clamp(num_sms > 0 ? num_sms : wanted, 1, budget);
}

// How many blocks begin with the first role. A block that has none of its work left goes on with
// the other role, but not back. So in a large batch as many begin as fill the links, even all: no
// block waits for peers' rows while it could move its own. Beyond that, and in a small batch, where
// a warp has a unit or two, blocks are divided as the rows are.
int first_blocks(const Division& rows, int blocks, int tokens) {
  if (rows.other < 1e-6 * rows.first || blocks == 1) return blocks;
  const auto share = static_cast<int>(std::lround(blocks * rows.first / (rows.first + rows.other)));
  const int divided = std::clamp(share, 1, blocks - 1);
  return tokens_at_once(tokens) > 0 ? divided : std::max(divided, std::min(rows.filling, blocks));
}

// The number of warps whose parts of shared memory fit, and whose threads fit into a block.
int warps_in(std::uint64_t warp_bytes, const LaunchLimits& device) {
  const std::uint64_t room = device.shared_bytes - kStaticSharedBytes;
  return static_cast<int>(std::clamp<std::uint64_t>(room / warp_bytes, 1, 32));
}

}  // namespace

int sm_budget(const CommonConfig& config, const LaunchLimits& device) {
  if (config.num_sms == 0) {
    const int share = (device.sms - kReservedSms) / device.ranks_on_device;
    return std::clamp(share / 2, 1, kMostChosen);
  }
  XD_REQUIRE(config.num_sms <= device.sms, "config.num_sms = ", config.num_sms,
             ", expected at most the device's ", device.sms, " multiprocessors");
  XD_REQUIRE(config.num_sms * device.ranks_on_device <= device.sms,
             "config.num_sms = ", config.num_sms, " for each of ", device.ranks_on_device,
             " ranks on one device, expected at most ", device.sms / device.ranks_on_device,
             ": their kernels wait for one another and must fit together");
  return config.num_sms;
}

LaunchShape prepare_shape(int experts, int ranks, int tokens, int budget,
                          const LaunchLimits& device) {
  // Shared memory holds every warp's counters with the sums of the blocks before, the sums of what
  // the ranks say, and the first rows of all zones.
  const std::size_t columns = counter_columns(experts, ranks);
  const std::size_t room = (device.shared_bytes - kStaticSharedBytes) / sizeof(std::uint32_t);
  const std::size_t others = columns + 2 * at(experts + ranks) + at(experts);
  const auto fitting = static_cast<std::int64_t>(room) - static_cast<std::int64_t>(others);
  const int fewest = (ranks + 31) / 32;  // some steps have a thread for each rank
  const auto warps = static_cast<int>(std::clamp<std::int64_t>(
      fitting / static_cast<std::int64_t>(columns), fewest, kMostPrepareWarps));
  // A warp numbers its tokens one step after another, four of top-8 in a step, which speaks for
  // many warps. But every block sums up all zones, and waits for all other blocks.
  constexpr int kMost = 32, kTokensPerWarp = 4;
  const int wanted = std::clamp((tokens / kTokensPerWarp + warps - 1) / warps, 1, kMost);
  return {.blocks = std::min({wanted + 1, budget, device.sms}),  // one block for the plan's head
          .first_blocks = 0,
          .threads = warps * 32,
          .shared_bytes = (at(warps) * columns + others) * sizeof(std::uint32_t)};
}

LaunchShape dispatch_shape(const Traffic& traffic, const RowPieces& send, const RowPieces& fan_out,
                           int num_sms, int budget, const LaunchLimits& device) {
  const std::uint64_t warp_bytes = dispatch_warp_bytes(send, fan_out, traffic.scaled);
  const int warps = std::min(warps_in(warp_bytes, device), kMostMoverWarps);
  const RowsPerToken rows = rows_per_token(traffic);
  // Rows for this rank itself go to all their places at once. A peer's row arrives first, and is
  // copied from there to its other places or, out of staging memory, to all of them.
  const double copies = traffic.row_per_expert ? 0.0 : rows.remote;
  const double moves = rows.delivered + (traffic.receives ? copies : 0.0);
  const int latency = (tokens_at_once(traffic.tokens) + warps - 1) / warps;
  int wanted = std::max(sms_for_links(moves, rows.remote, kStoreRate, 1.12),
                        traffic.receives ? 2 * latency : latency);
  // A token is read and sent. Where it is scaled, its gradient is read once for each rank, and each
  // row is read in expert_out and written.
  if (traffic.scaled) {
    const double scaled = 1.0 + rows.remote + rows.ranks + 2.0 * rows.delivered;
    wanted = std::max(wanted, sms_for_links(scaled, rows.remote, kSumRate, 1.05));
  }
  // Two bytes are read for each that is sent.
  if (send.scales_bytes != 0) {
    wanted = std::max(wanted, sms_for_links(2.0, rows.remote, kQuantiseRate, 1.0));
  }
  LaunchShape shape{.blocks = blocks_for(wanted, num_sms, budget)};
  shape.first_blocks =
      first_blocks(division_of_dispatch(rows, traffic), shape.blocks, traffic.tokens);
  shape.threads = warps * 32;
  shape.shared_bytes = at(warps) * warp_bytes;
  return shape;
}

LaunchShape combine_shape(const Traffic& traffic, int num_sms, int budget,
                          const LaunchLimits& device) {
  const RowsPerToken rows = rows_per_token(traffic);
  const double pushed = traffic.receives ? rows.delivered + rows.ranks : 0.0;
  double moves = pushed + rows.ranks + 1.0;
  if (traffic.coded) {
    const Division codes = division_of_codes(rows, traffic);
    moves = 2.5 * (codes.first + codes.other);
  }
  // With few tokens several warps share each.
  const int latency = std::min(tokens_at_once(traffic.tokens) / 4 + 1, kMostChosen);
  const int wanted = std::max(sms_for_links(moves, rows.remote, kSumRate, 1.05),
                              traffic.receives ? 2 * latency : latency);
  LaunchShape shape{.blocks = std::min(blocks_for(wanted, num_sms, budget), device.sms)};
  shape.first_blocks =
      first_blocks(division_of_combine(rows, traffic), shape.blocks, traffic.tokens);
  const int warps = std::min(warps_in(TermPieces::kBytes, device), kCombineWarps);
  shape.threads = warps * 32;
  shape.shared_bytes = at(warps) * TermPieces::kBytes;
  return shape;
}

std::string explain(const char* operation, const LaunchShape& shape, const Traffic& traffic,
                    int num_sms, int budget) {
  return concat(operation, ": ", shape.blocks, " multiprocessors (",
                num_sms > 0 ? "as asked for" : "chosen", ", budget ", budget, "), ",
                shape.first_blocks, " begin with rows for peers, ", shape.threads / 32,
                " warps each, for ", traffic.tokens, " tokens of ", traffic.row_bytes, " bytes, ",
                traffic.ranks, " ranks, top-", traffic.topk,
                traffic.receives ? ", with local copies" : "", "; one multiprocessor stores ",
                kStoreRate, " or sums ", kSumRate, " GB/s, the links carry ", kLinkRate);
}

}  // namespace xd::ep::cuda
