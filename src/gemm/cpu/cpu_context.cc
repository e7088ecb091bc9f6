#include "base/error.h"
#include "gemm/cpu/executor.h"

namespace xd::gemm::cpu {
namespace {

constexpr const char* kMissing = "not built in: products on the CPU";

std::unique_ptr<Context> make_context(std::shared_ptr<Comm>, const xd_gemm_config*) {
  fail(XD_ERROR_UNSUPPORTED, kMissing);
}

xd_gemm_memory context_memory(const Config&) { fail(XD_ERROR_UNSUPPORTED, kMissing); }

}  // namespace

const Executor kExecutor{.device_type = kDLCPU,
                         .make_context = make_context,
                         .context_memory = context_memory,
                         .availability = [] {
                           return Feature{false, kMissing};
                         }};

}  // namespace xd::gemm::cpu
