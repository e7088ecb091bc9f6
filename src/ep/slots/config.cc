#include "ep/slots/config.h"

#include "base/error.h"
#include "base/options.h"
#include "ep/slots/placement.h"

namespace xd::ep {

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
  config.in_flight = read.in_flight != 0 ? read.in_flight : 2;
  config.masks_lost_peers = read.on_peer_loss == XD_LL_PEER_LOSS_MASK;
  config.wait_timeout_ms = read.wait_timeout_ms;
  return config;
}

}  // namespace xd::ep
