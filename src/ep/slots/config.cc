#include "ep/slots/config.h"

#include <algorithm>

#include "base/error.h"
#include "base/options.h"
#include "ep/slots/placement.h"

namespace xd::ep {
namespace {

void read_receive(const xd_ll_config& user, LlConfig& config) {
  require_range("receive", raw_enum(user.receive), XD_LL_SLOTS, XD_LL_BY_RANK);
  config.receive = user.receive;
  constexpr int kMostAlignment = 1 << 20;
  require_range("alignment", user.alignment, 0, kMostAlignment);
  XD_REQUIRE((user.alignment & (user.alignment - 1)) == 0, "config.alignment = ", user.alignment,
             ", expected 0 or a power of two");
  XD_REQUIRE(user.alignment <= 1 || user.receive == XD_LL_BY_EXPERT,
             "config.alignment = ", user.alignment, ", expected 0 or 1: receive = XD_LL_",
             receive_name(user.receive));
  config.alignment = std::max(user.alignment, 1);
  // Row numbers have 31 bits.
  const std::int64_t rows = recv_bound(config, 0);
  XD_REQUIRE(rows < INT32_MAX, "config: a rank may receive ", rows, " rows, expected at most ",
             INT32_MAX - 1);
}

}  // namespace

LlConfig read_ll_config(const xd_ll_config* user, int comm_ranks) {
  const xd_ll_config read = read_struct("config", user, xd_ll_config XD_LL_CONFIG_INIT);
  constexpr DType kPayloads[] = {DType::bf16, DType::f16, DType::f32};
  LlConfig config;
  static_cast<CommonConfig&>(config) =
      read_common(CommonFields::of(read), comm_ranks, {kPayloads, "bfloat16, float16 or float32"});
  require_range("num_ranks", config.ranks, 1, XD_LL_MAX_RANKS);
  require_range("max_tokens_per_rank", config.max_tokens, 1, XD_LL_MAX_TOKENS);
  require_range("on_peer_loss", raw_enum(read.on_peer_loss), XD_LL_PEER_LOSS_FATAL,
                XD_LL_PEER_LOSS_MASK);
  XD_REQUIRE(read.in_flight == 0 || (read.in_flight >= 2 && read.in_flight <= XD_LL_MAX_IN_FLIGHT),
             "config.in_flight = ", read.in_flight, ", expected 0 or 2 to ", XD_LL_MAX_IN_FLIGHT);
  require_range("wait_timeout_ms", read.wait_timeout_ms, 0, INT32_MAX);
  // Slots of all local experts are numbered with 31 bits.
  const std::int64_t slots = std::int64_t{config.most_local_experts()} * slots_per_expert(config);
  XD_REQUIRE(slots <= INT32_MAX, "config: a rank's experts have ", slots,
             " slots, expected at most ", INT32_MAX);
  read_receive(read, config);
  config.in_flight = read.in_flight != 0 ? read.in_flight : 2;
  config.masks_lost_peers = read.on_peer_loss == XD_LL_PEER_LOSS_MASK;
  config.wait_timeout_ms = read.wait_timeout_ms;
  return config;
}

std::int64_t recv_bound(const LlConfig& config, std::int32_t max_tokens) {
  XD_REQUIRE(max_tokens >= 0 && max_tokens <= config.max_tokens, "max_tokens = ", max_tokens,
             ", expected 0 to max_tokens_per_rank = ", config.max_tokens);
  if (config.has_slots()) return 0;
  const Layout layout = Layout::of(config.by_rank() ? XD_EP_RANK_MAJOR : XD_EP_EXPERT_MAJOR);
  return recv_bound(config, max_tokens != 0 ? max_tokens : config.max_tokens, layout,
                    config.alignment);
}

}  // namespace xd::ep
