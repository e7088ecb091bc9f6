#include "gemm/config.h"

#include "base/error.h"
#include "base/math.h"
#include "base/options.h"
#include "comm/device/kinds.h"

namespace xd::gemm {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 26;
constexpr std::int64_t kMostColumns = std::int64_t{1} << 26;
constexpr int kAllOperations = 2 * XD_GEMM_BIT(XD_GEMM_START_ALL_GATHER) - 1;
constexpr int kUsualOperations = XD_GEMM_BIT(XD_GEMM_ALL_GATHER) |
                                 XD_GEMM_BIT(XD_GEMM_REDUCE_SCATTER) |
                                 XD_GEMM_BIT(XD_GEMM_ALL_REDUCE);

void require_range(const char* field, std::int64_t value, std::int64_t low, std::int64_t high) {
  XD_REQUIRE(value >= low && value <= high, "config.", field, " = ", value, ", expected ", low,
             " to ", high);
}

void read_ranks(const xd_gemm_config& user, int comm_ranks, Config& config) {
  if (comm_ranks > 0) {
    XD_REQUIRE(user.num_ranks == 0 || user.num_ranks == comm_ranks,
               "config.num_ranks = ", user.num_ranks, ", expected 0 or the communicator's ",
               comm_ranks);
  } else {
    require_range("num_ranks", user.num_ranks, 1, XD_MAX_RANKS);
  }
  config.ranks = comm_ranks > 0 ? comm_ranks : user.num_ranks;
  XD_REQUIRE(user.device_type == 0 || find_device_kind(user.device_type) != nullptr,
             "config.device_type = ", user.device_type, ", expected 0, ", device_type_names());
  config.device_type = user.device_type;
}

void read_type(const xd_gemm_config& user, Config& config) {
  const auto type = dtype_of(user.dtype);
  const bool known = type && (*type == DType::bf16 || *type == DType::f16 || *type == DType::f32 ||
                              *type == DType::e4m3 || *type == DType::e5m2);
  XD_REQUIRE(known, "config.dtype = ", describe_dtype(user.dtype),
             ", expected bfloat16, float16, float32, float8_e4m3fn or float8_e5m2");
  config.type = *type;
}

void read_sizes(const xd_gemm_config& user, Config& config) {
  require_range("operations", user.operations, 0, kAllOperations);
  config.operations = user.operations != 0 ? user.operations : kUsualOperations;
  require_range("max_tokens", user.max_tokens, 1, kMostTokens);
  config.max_tokens = user.max_tokens;
  // A bound that no operation of the context reads may be left out.
  require_range("max_k", user.max_k, config.gathers() ? 1 : 0, kMostColumns);
  require_range("max_n", user.max_n, config.sums() || config.has(XD_GEMM_ALL_GATHER) ? 1 : 0,
                kMostColumns);
  config.max_k = user.max_k;
  config.max_n = user.max_n;
  const auto rows = static_cast<std::uint64_t>(config.all_tokens());
  XD_REQUIRE(rows <= INT32_MAX, "config.max_tokens = ", config.max_tokens, " on ", config.ranks,
             " ranks, expected at most ", INT32_MAX, " tokens of all ranks");
  const auto columns = static_cast<std::uint64_t>(std::max(config.max_k, config.max_n));
  checked_mul(rows, 4 * columns, "config.max_tokens * num_ranks * columns");
}

}  // namespace

Config read_config(const xd_gemm_config* user, int comm_ranks) {
  const auto read = read_struct("config", user, xd_gemm_config XD_GEMM_CONFIG_INIT);
  Config config;
  read_ranks(read, comm_ranks, config);
  read_type(read, config);
  read_sizes(read, config);
  config.algo = read_algo("config.algo", raw_enum(read.algo));
  require_range("num_comm_sms", read.num_comm_sms, 0, 4096);
  require_range("keep_gathered", read.keep_gathered, 0, 1);
  require_range("allow_fallback", read.allow_fallback, 0, 1);
  config.num_comm_sms = read.num_comm_sms;
  config.keep_gathered = read.keep_gathered != 0;
  config.allow_fallback = read.allow_fallback != 0;
  config.nccl_comm = read.nccl_comm;
  return config;
}

xd_gemm_algo read_algo(const char* field, int algo) {
  const bool known = (algo >= XD_GEMM_ALGO_AUTO && algo <= XD_GEMM_ALGO_SEQUENTIAL) ||
                     is_cublasmp(static_cast<xd_gemm_algo>(algo));
  XD_REQUIRE(known, field, " = ", algo, ", expected an xd_gemm_algo, 0 to ",
             int{XD_GEMM_ALGO_SEQUENTIAL}, " or ", int{XD_GEMM_ALGO_CUBLASMP}, " to ",
             int{XD_GEMM_ALGO_CUBLASMP_FUSED});
  return static_cast<xd_gemm_algo>(algo);
}

std::int64_t local_size(std::int64_t global, int rank, int ranks) {
  XD_REQUIRE(global >= 0, "global = ", global, ", expected 0 or more");
  XD_REQUIRE(rank >= 0 && rank < ranks, "rank = ", rank,
             ", expected 0 to num_ranks - 1 = ", ranks - 1);
  const std::int64_t each = global / ranks + (global % ranks != 0 ? 1 : 0);
  const std::int64_t before = std::min(global, each * rank);
  return std::min(each, global - before);
}

}  // namespace xd::gemm
