#include "ep/plan/config.h"

#include <crossdock/low_latency.h>

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/math.h"
#include "base/options.h"
#include "comm/device_kinds.h"

namespace xd::ep {
namespace {

void require_range(const char* field, std::int64_t value, std::int64_t low, std::int64_t high) {
  XD_REQUIRE(value >= low && value <= high, "config.", field, " = ", value, ", expected ", low,
             " to ", high);
}

bool is_payload(DType type) {
  switch (type) {
    case DType::bf16:
    case DType::f16:
    case DType::f32:
    case DType::e4m3:
    case DType::e5m2:
    case DType::i8:
    case DType::u8:
      return true;
    default:
      return false;
  }
}

void read_device(const xd_ep_config& user, Config& config) {
  XD_REQUIRE(user.device_type == 0 || find_device_kind(user.device_type) != nullptr,
             "config.device_type = ", user.device_type, ", expected 0, ", device_type_names());
  config.device_type = user.device_type;
}

void read_sizes(const xd_ep_config& user, int comm_ranks, Config& config) {
  if (comm_ranks > 0) {
    XD_REQUIRE(user.num_ranks == 0 || user.num_ranks == comm_ranks,
               "config.num_ranks = ", user.num_ranks, ", expected 0 or the communicator's ",
               comm_ranks);
  } else {
    require_range("num_ranks", user.num_ranks, 1, kMaxRanks);
  }
  config.ranks = comm_ranks > 0 ? comm_ranks : user.num_ranks;
  require_range("num_experts", user.num_experts, 1, kMaxExperts);
  config.experts = user.num_experts;
  config.expert_tables =
      ExpertTables::read(user.expert_ranks, config.experts, config.ranks, "config.");
  config.local_experts = config.most_local_experts();
  require_range("max_topk", user.max_topk, 1, kMaxTopk);
  config.max_topk = user.max_topk;
  // 2^26 tokens * 32 choices: every index into a plan fits into 31 bits.
  require_range("max_tokens_per_rank", user.max_tokens_per_rank, 1, XD_EP_MAX_TOKENS);
  config.max_tokens = user.max_tokens_per_rank;
}

void read_rows(const xd_ep_config& user, Config& config) {
  const auto type = dtype_of(user.dtype);
  XD_REQUIRE(type && is_payload(*type), "config.dtype = ", describe_dtype(user.dtype),
             ", expected bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, int8 or uint8");
  require_range("hidden", user.hidden, 1, std::int64_t{1} << 24);
  config.max_row_bytes = static_cast<std::uint64_t>(user.hidden) * dtype_bytes(*type);
  XD_REQUIRE(config.max_row_bytes % kRowAlignment == 0, "config.hidden = ", user.hidden,
             ": a row of ", dtype_name(*type), " has ", config.max_row_bytes,
             " bytes, expected a multiple of ", kRowAlignment);
  require_range("max_scale_bytes", user.max_scale_bytes, 0, std::int64_t{1} << 26);
  config.max_scale_bytes = static_cast<std::uint64_t>(user.max_scale_bytes);
}

void require_zero(const char* field, std::int64_t value, const char* where) {
  XD_REQUIRE(value == 0, "config.", field, " = ", value, ", expected 0 ", where);
}

// Checks a group of EXPERT_SLOTS: its own fields, and those that only other layouts have.
void read_slots(const xd_ep_config& user, Config& config) {
  require_range("on_peer_loss", raw_enum(user.on_peer_loss), XD_EP_PEER_LOSS_FATAL,
                XD_EP_PEER_LOSS_MASK);
  if (!config.layout.is_slots()) {
    constexpr const char* kWhere = "in every layout but EXPERT_SLOTS";
    require_zero("in_flight", user.in_flight, kWhere);
    require_zero("on_peer_loss", raw_enum(user.on_peer_loss), kWhere);
    return require_zero("wait_timeout_ms", user.wait_timeout_ms, kWhere);
  }
  constexpr const char* kWhere = "in EXPERT_SLOTS";
  require_zero("recv_capacity", user.recv_capacity, kWhere);
  require_zero("max_scale_bytes", user.max_scale_bytes, kWhere);
  require_zero("zero_tail", user.zero_tail, kWhere);
  require_zero("overflow", raw_enum(user.overflow), kWhere);
  require_zero("staging", raw_enum(user.staging), kWhere);
  require_zero("net_buffer_bytes", user.net_buffer_bytes, kWhere);
  require_range("alignment", user.alignment, 0, 1);
  require_range("num_ranks", config.ranks, 1, XD_EP_LL_MAX_RANKS);
  require_range("max_tokens_per_rank", config.max_tokens, 1, XD_EP_LL_MAX_TOKENS);
  XD_REQUIRE(
      user.in_flight == 0 || (user.in_flight >= 2 && user.in_flight <= XD_EP_LL_MAX_IN_FLIGHT),
      "config.in_flight = ", user.in_flight, ", expected 0 or 2 to ", XD_EP_LL_MAX_IN_FLIGHT);
  require_range("wait_timeout_ms", user.wait_timeout_ms, 0, INT32_MAX);
  const auto type = *dtype_of(user.dtype);
  XD_REQUIRE(type == DType::bf16 || type == DType::f16 || type == DType::f32,
             "config.dtype = ", dtype_name(type),
             ", expected bfloat16, float16 or float32 in EXPERT_SLOTS");
  // Slots of all local experts are numbered with 31 bits.
  const std::int64_t slots = std::int64_t{config.most_local_experts()} * recv_bound(config);
  XD_REQUIRE(slots <= INT32_MAX, "config: a rank's experts have ", slots,
             " slots, expected at most ", INT32_MAX);
  config.in_flight = user.in_flight != 0 ? user.in_flight : 2;
  config.masks_lost_peers = user.on_peer_loss == XD_EP_PEER_LOSS_MASK;
  config.wait_timeout_ms = user.wait_timeout_ms;
}

void read_receive(const xd_ep_config& user, Config& config) {
  require_range("layout", raw_enum(user.layout), 0, kNumLayouts - 1);
  require_range("overflow", raw_enum(user.overflow), XD_EP_OVERFLOW_ERROR, XD_EP_OVERFLOW_DROP);
  require_range("duplicate_ids", raw_enum(user.duplicate_ids), XD_EP_DUPLICATE_IDS_ERROR,
                XD_EP_DUPLICATE_IDS_COLLAPSE);
  require_range("on_error", raw_enum(user.on_error), XD_EP_ON_ERROR_STATUS, XD_EP_ON_ERROR_FATAL);
  require_range("staging", raw_enum(user.staging), XD_EP_STAGING_AUTO, XD_EP_STAGING_NONE);
  require_range("zero_tail", user.zero_tail, 0, 1);
  require_range("num_sms", user.num_sms, 0, 4096);
  config.num_sms = user.num_sms;
  require_range("net_buffer_bytes", user.net_buffer_bytes, 0, std::int64_t{1} << 62);
  config.net_buffer_bytes = static_cast<std::uint64_t>(user.net_buffer_bytes);
  XD_REQUIRE(user.alignment >= 0 && user.alignment <= (1 << 20) &&
                 std::popcount(static_cast<unsigned>(user.alignment)) <= 1,
             "config.alignment = ", user.alignment, ", expected 0 or a power of two up to 1048576");
  config.layout = Layout::of(user.layout);
  read_slots(user, config);
  config.overflow = user.overflow;
  config.fatal_errors = user.on_error == XD_EP_ON_ERROR_FATAL;
  config.collapse = user.duplicate_ids == XD_EP_DUPLICATE_IDS_COLLAPSE;
  config.staging = user.staging == XD_EP_STAGING_AUTO;
  config.any_staging = config.staging;
  config.zero_tail = user.zero_tail != 0;
  config.alignment = std::max(1, user.alignment);
  const std::int64_t bound = recv_bound(config);
  // Row numbers have 31 bits.
  XD_REQUIRE(user.recv_capacity != 0 || bound < INT32_MAX, "config.recv_capacity = 0 stands for ",
             bound, " rows, more than ", INT32_MAX - 1, ": set it");
  require_range("recv_capacity", user.recv_capacity, 0, INT32_MAX - 1);
  XD_REQUIRE(user.recv_capacity == 0 || user.recv_capacity >= config.alignment,
             "config.recv_capacity = ", user.recv_capacity,
             ", expected 0 or at least alignment = ", config.alignment);
  config.capacity = user.recv_capacity != 0 ? user.recv_capacity : bound;
}

}  // namespace

Config read_config(const xd_ep_config* user, int comm_ranks) {
  const xd_ep_config read = read_struct("config", user, xd_ep_config XD_EP_CONFIG_INIT);
  Config config;
  read_device(read, config);
  read_sizes(read, comm_ranks, config);
  read_rows(read, config);
  read_receive(read, config);
  return config;
}

bool asks_for_slots(const xd_ep_config* user) {
  constexpr std::size_t kEnd = offsetof(xd_ep_config, layout) + sizeof(user->layout);
  return user != nullptr && user->struct_size >= kEnd &&
         raw_enum(user->layout) == XD_EP_EXPERT_SLOTS;
}

std::int64_t recv_bound(const Config& config) {
  const std::int64_t tokens = std::int64_t{config.ranks} * config.max_tokens;
  if (config.layout.is_slots()) return tokens;
  if (!config.layout.row_per_expert) {
    return static_cast<std::int64_t>(
        round_up(static_cast<std::uint64_t>(tokens), static_cast<std::uint64_t>(config.alignment)));
  }
  // All numbers of rows per expert, each at most `tokens` and together at most `rows`, occur in
  // some routing. In units of `alignment` rows, an expert's first unit takes one row to fill, every
  // further one `alignment` rows: so each expert gets one, and the rest go where there is room.
  const std::int64_t rows = config.ranks * static_cast<std::int64_t>(config.rows_per_source());
  const std::int64_t experts = std::min<std::int64_t>(config.most_local_experts(), rows);
  const std::int64_t room = experts * ((tokens - 1) / config.alignment);
  return config.alignment * (experts + std::min(room, (rows - experts) / config.alignment));
}

}  // namespace xd::ep
