#include "ep/slots/group.h"

#include <array>
#include <span>
#include <vector>

#include "base/error.h"

namespace xd::ep {
namespace {

// The part of a config that ranks tell one another.
struct LlTerms : CommonTerms {
  std::int64_t in_flight, on_peer_loss, wait_timeout_ms, receive, alignment;

  static LlTerms of(const LlConfig& c) {
    return {CommonTerms::of(c), c.in_flight, c.masks_lost_peers,
            c.wait_timeout_ms,  c.receive,   c.alignment};
  }
  static std::string sizes_of(const LlConfig& c) { return "low latency, " + common_sizes(c); }
};

using Field = turn::EqualField<LlTerms>;
constexpr std::array kEqualFields = {
    Field{"in_flight", &LlTerms::in_flight},
    Field{"on_peer_loss", &LlTerms::on_peer_loss,
          [](std::int64_t value) { return value != 0 ? "MASK" : "FATAL"; }},
    Field{"wait_timeout_ms", &LlTerms::wait_timeout_ms},
    Field{"receive", &LlTerms::receive,
          [](std::int64_t value) { return receive_name(static_cast<xd_ll_receive>(value)); }},
    Field{"alignment", &LlTerms::alignment},
};

}  // namespace

LlGroup::LlGroup(std::shared_ptr<Comm> owner, const xd_ll_config* config)
    : GroupOf(std::move(owner)) {
  const std::vector<LlTerms> of_rank = agree_on_sizes<LlTerms>(
      kEqualFields, [&](int num_ranks) { return read_ll_config(config, num_ranks); });
  const auto terms = std::as_bytes(std::span(&of_rank[0], 1));
  terms_.assign(terms.begin(), terms.end());
  if (config_.masks_lost_peers) {
    comm().note_group_wait(config_.wait_timeout_ms != 0 ? config_.wait_timeout_ms
                                                        : comm().timeout_ms());
  }
}

void LlGroup::require_masks() const {
  XD_REQUIRE(config_.masks_lost_peers,
             "group: was made with on_peer_loss = XD_LL_PEER_LOSS_FATAL, expected "
             "XD_LL_PEER_LOSS_MASK");
}

void LlGroup::join_failed_operation(std::int32_t operation, const char* text, xd_stream stream) {
  // Dispatch and combine take turns apart, so no other operation would do.
  XD_REQUIRE(operation == XD_LL_DISPATCH || operation == XD_LL_COMBINE ||
                 (operation == XD_LL_SET_PLACEMENT && config_.logical_experts > 0),
             "operation = ", operation,
             ", expected XD_LL_DISPATCH or XD_LL_COMBINE, or in groups with logical experts "
             "XD_LL_SET_PLACEMENT; peers do not hear of this call");
  join_failed(operation, text, stream);
}

}  // namespace xd::ep
