#include "gemm/context.h"

#include <array>

#include "base/error.h"
#include "turn/agreement.h"

namespace xd::gemm {
namespace {

// The part of a config that ranks tell one another: equal on all ranks.
struct Announcement {
  std::int64_t operations, max_tokens, max_k, max_n, type, algo, keep_gathered, allow_fallback,
      lends_nccl;
  std::int64_t comm_sms;  // of cuBLASMp, whose kernels on one rank wait for those on the others
};

using Field = turn::EqualField<Announcement>;
constexpr std::array kEqualFields = {
    Field{"operations", &Announcement::operations},
    Field{"max_tokens", &Announcement::max_tokens},
    Field{"max_k", &Announcement::max_k},
    Field{"max_n", &Announcement::max_n},
    Field{"dtype (number)", &Announcement::type},
    Field{"algo", &Announcement::algo},
    Field{"keep_gathered", &Announcement::keep_gathered},
    Field{"allow_fallback", &Announcement::allow_fallback},
    Field{"nccl_comm (1 = given)", &Announcement::lends_nccl},
    Field{"num_comm_sms", &Announcement::comm_sms},
};

Announcement announce(const Config& c) {
  return {.operations = c.operations,
          .max_tokens = c.max_tokens,
          .max_k = c.max_k,
          .max_n = c.max_n,
          .type = static_cast<std::int64_t>(c.type),
          .algo = c.algo,
          .keep_gathered = c.keep_gathered,
          .allow_fallback = c.allow_fallback,
          .lends_nccl = c.nccl_comm != nullptr,
          .comm_sms = c.is_for_cublasmp() ? c.num_comm_sms : 0};
}

std::string sizes_of(const Config& c) {
  return concat("products, T<=", c.max_tokens, " K<=", c.max_k, " N<=", c.max_n);
}

}  // namespace

Context::Context(std::shared_ptr<Comm> comm, const xd_gemm_config* config)
    : Sequence(std::move(comm)) {
  Comm& c = Sequence::comm();
  c.require_all_near("a product overlapped with communication");
  const auto of_rank = c.collective().agree_on(kCreateContext, [&] {
    config_ = read_config(config, c.num_ranks());
    XD_REQUIRE(config_.device_type == 0 || config_.device_type == c.device().device_type,
               "config.device_type = ", config_.device_type, ", expected 0 or the communicator's ",
               int{c.device().device_type});
    c.collective().describe(sizes_of(config_));
    return announce(config_);
  });
  turn::require_equal<Announcement>(kEqualFields, of_rank);
  subject().describe(sizes_of(config_));
}

xd_gemm_plan_info Context::explain(std::int32_t operation, const xd_gemm_args* args) const {
  XD_REQUIRE(operation == XD_GEMM_ALL_GATHER || operation == XD_GEMM_REDUCE_SCATTER ||
                 operation == XD_GEMM_ALL_REDUCE,
             "operation = ", operation,
             ", expected XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER or XD_GEMM_ALL_REDUCE");
  std::vector<std::int64_t> starts(at(config_.ranks) + 1);
  CallContext context = call_context(starts);
  context.shape_only = true;
  return plan_of(read_product(static_cast<xd_gemm_operation>(operation), args, context));
}

}  // namespace xd::gemm
