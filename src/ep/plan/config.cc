#include "ep/plan/config.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/math.h"
#include "base/options.h"
#include "comm/device/kinds.h"

namespace xd::ep {
namespace {

constexpr DType kPayloads[] = {DType::bf16, DType::f16, DType::f32, DType::e4m3,
                               DType::e5m2, DType::i8,  DType::u8,  DType::e2m1x2};

void read_device(const CommonFields& user, CommonConfig& config) {
  XD_REQUIRE(user.device_type == 0 || find_device_kind(user.device_type) != nullptr,
             "config.device_type = ", user.device_type, ", expected 0, ", device_type_names());
  config.device_type = user.device_type;
}

void read_sizes(const CommonFields& user, int comm_ranks, CommonConfig& config) {
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
  require_range("num_logical_experts", user.num_logical_experts, 0, user.num_experts);
  config.logical_experts = static_cast<int>(user.num_logical_experts);
  config.expert_tables =
      ExpertTables::read(user.expert_ranks, config.experts, config.ranks, "config.");
  config.local_experts = config.most_local_experts();
  require_range("max_topk", user.max_topk, 1, kMaxTopk);
  config.max_topk = user.max_topk;
  // 2^26 tokens * 32 choices: every index into a plan fits into 31 bits.
  require_range("max_tokens_per_rank", user.max_tokens_per_rank, 1, XD_EP_MAX_TOKENS);
  config.max_tokens = user.max_tokens_per_rank;
}

void read_rows(const CommonFields& user, const Payloads& payloads, CommonConfig& config) {
  const auto type = dtype_of(user.dtype);
  XD_REQUIRE(type && std::ranges::find(payloads.types, *type) != payloads.types.end(),
             "config.dtype = ", describe_dtype(user.dtype), ", expected ", payloads.names);
  require_range("hidden", user.hidden, 1, std::int64_t{1} << 24);
  config.max_row_bytes = static_cast<std::uint64_t>(user.hidden) * dtype_bytes(*type);
  XD_REQUIRE(config.max_row_bytes % kRowAlignment == 0, "config.hidden = ", user.hidden,
             ": a row of ", dtype_name(*type), " has ", config.max_row_bytes,
             " bytes, expected a multiple of ", kRowAlignment);
}

void read_receive(const xd_ep_config& user, Config& config) {
  require_range("max_scale_bytes", user.max_scale_bytes, 0, std::int64_t{1} << 26);
  config.max_scale_bytes = static_cast<std::uint64_t>(user.max_scale_bytes);
  require_range("layout", raw_enum(user.layout), 0, kNumLayouts - 1);
  require_range("overflow", raw_enum(user.overflow), XD_EP_OVERFLOW_ERROR, XD_EP_OVERFLOW_DROP);
  require_range("staging", raw_enum(user.staging), XD_EP_STAGING_AUTO, XD_EP_STAGING_NONE);
  require_range("zero_tail", user.zero_tail, 0, 1);
  require_range("on_peer_loss", raw_enum(user.on_peer_loss), XD_EP_PEER_LOSS_FATAL,
                XD_EP_PEER_LOSS_RESUME);
  config.outlives_losses = user.on_peer_loss == XD_EP_PEER_LOSS_RESUME;
  require_range("net_buffer_bytes", user.net_buffer_bytes, 0, std::int64_t{1} << 62);
  config.net_buffer_bytes = static_cast<std::uint64_t>(user.net_buffer_bytes);
  XD_REQUIRE(user.alignment >= 0 && user.alignment <= (1 << 20) &&
                 std::popcount(static_cast<unsigned>(user.alignment)) <= 1,
             "config.alignment = ", user.alignment, ", expected 0 or a power of two up to 1048576");
  config.layout = Layout::of(user.layout);
  config.overflow = user.overflow;
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

void require_range(const char* field, std::int64_t value, std::int64_t low, std::int64_t high) {
  XD_REQUIRE(value >= low && value <= high, "config.", field, " = ", value, ", expected ", low,
             " to ", high);
}

WireFormat read_wire(const xd_ep_wire& given, const CommonConfig& config) {
  const int wire = raw_enum(given);
  XD_REQUIRE(wire >= XD_EP_WIRE_SAME && wire < kNumWires, "wire = ", wire,
             ", expected an xd_ep_wire, 0 to ", kNumWires - 1);
  XD_REQUIRE(given == XD_EP_WIRE_SAME || (config.wire_formats >> wire & 1) != 0,
             "wire = XD_EP_WIRE_", wire_name(given),
             ", expected XD_EP_WIRE_SAME or one of config.wire_formats = ", config.wire_formats,
             ", which lacks XD_EP_WIRE_BIT(", wire, ") = ", 1u << wire);
  return wire_format(given);
}

void require_wire_fits(const WireFormat& wire, const char* tensor, std::int64_t columns) {
  XD_REQUIRE(!wire.codes || columns % wire.codes.block == 0, tensor, ": has ", columns,
             " columns, expected a multiple of ", wire.codes.block, ": wire = XD_EP_WIRE_",
             wire_name(wire.wire));
}

void require_no_wires(const CommonConfig& config) {
  if (config.wire_formats >> 1 == 0) return;
  fail(XD_ERROR_UNSUPPORTED, "config.wire_formats = ", config.wire_formats,
       ", expected 0: between machines combine has no wire but XD_EP_WIRE_SAME on CUDA devices so "
       "far");
}

void require_logical_experts(const CommonConfig& config) {
  XD_REQUIRE(
      config.logical_experts > 0,
      "group: was made with num_logical_experts = 0, expected 1 to num_experts = ", config.experts);
}

void require_outlives_losses(const Config& config) {
  XD_REQUIRE(config.outlives_losses,
             "group: was made with on_peer_loss = XD_EP_PEER_LOSS_FATAL, expected "
             "XD_EP_PEER_LOSS_RESUME");
}

void require_no_resume(const Config& config) {
  if (!config.outlives_losses) return;
  fail(XD_ERROR_UNSUPPORTED,
       "config.on_peer_loss = XD_EP_PEER_LOSS_RESUME is not there yet on CUDA devices, expected "
       "XD_EP_PEER_LOSS_FATAL");
}

CommonConfig read_common(const CommonFields& user, int comm_ranks, const Payloads& payloads) {
  CommonConfig config;
  read_device(user, config);
  read_sizes(user, comm_ranks, config);
  read_rows(user, payloads, config);
  require_range("duplicate_ids", user.duplicate_ids, XD_EP_DUPLICATE_IDS_ERROR,
                XD_EP_DUPLICATE_IDS_COLLAPSE);
  config.collapse = user.duplicate_ids == XD_EP_DUPLICATE_IDS_COLLAPSE;
  require_range("on_error", user.on_error, XD_EP_ON_ERROR_STATUS, XD_EP_ON_ERROR_FATAL);
  config.fatal_errors = user.on_error == XD_EP_ON_ERROR_FATAL;
  require_range("num_sms", user.num_sms, 0, 4096);
  config.num_sms = user.num_sms;
  XD_REQUIRE(user.wire_formats >> kNumWires == 0, "config.wire_formats = ", user.wire_formats,
             ", expected a set of XD_EP_WIRE_BIT of wires, below ", 1u << kNumWires);
  config.wire_formats = user.wire_formats & ~XD_EP_WIRE_BIT(XD_EP_WIRE_SAME);  // needs none
  return config;
}

Config read_config(const xd_ep_config* user, int comm_ranks) {
  const xd_ep_config read = read_struct("config", user, xd_ep_config XD_EP_CONFIG_INIT);
  constexpr const char* kNames =
      "bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, int8, uint8 or float4_e2m1fn_x2";
  Config config;
  static_cast<CommonConfig&>(config) =
      read_common(CommonFields::of(read), comm_ranks, {kPayloads, kNames});
  read_receive(read, config);
  return config;
}

std::int64_t recv_bound(const CommonConfig& sizes, int tokens_per_rank, const Layout& layout,
                        std::int64_t alignment) {
  const std::int64_t tokens = std::int64_t{sizes.ranks} * tokens_per_rank;
  if (!layout.row_per_expert) {
    return static_cast<std::int64_t>(
        round_up(static_cast<std::uint64_t>(tokens), static_cast<std::uint64_t>(alignment)));
  }
  // All numbers of rows per expert, each at most `tokens` and together at most `rows`, occur in
  // some routing. In units of `alignment` rows, an expert's first unit takes one row to fill, every
  // further one `alignment` rows: so each expert gets one, and the rest go where there is room.
  const std::int64_t rows = tokens * std::min(sizes.max_topk, sizes.most_local_experts());
  const std::int64_t experts = std::min<std::int64_t>(sizes.most_local_experts(), rows);
  const std::int64_t room = experts * ((tokens - 1) / alignment);
  return alignment * (experts + std::min(room, (rows - experts) / alignment));
}

}  // namespace xd::ep
