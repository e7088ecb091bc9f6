#include "gemm/cpu/plan.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/error.h"

namespace xd::gemm::cpu {
namespace {

// The fastest of an operation's algorithms comes first. None is expected to be slower than
// SEQUENTIAL: the others copy less, or let peers begin earlier.
constexpr std::array kAlgos = {XD_GEMM_ALGO_SPLIT_P2P, XD_GEMM_ALGO_SPLIT, XD_GEMM_ALGO_DIRECT,
                               XD_GEMM_ALGO_SEQUENTIAL, XD_GEMM_ALGO_FUSED};

xd_gemm_algo fastest(xd_gemm_operation operation) {
  return *std::ranges::find_if(
      kAlgos, [&](xd_gemm_algo algo) { return obstacle(operation, algo) == nullptr; });
}

struct Estimate {
  double gemm_us, transfer_us;
};

Estimate estimate(const Config& config, const ProductCall& call, xd_gemm_algo algo,
                  const Speed& speed, int rank) {
  const bool gathers = call.operation == XD_GEMM_ALL_GATHER;
  const bool all = call.operation == XD_GEMM_ALL_REDUCE;
  const double rows = static_cast<double>(gathers ? call.shares.all() : call.a_rows);
  const double own = static_cast<double>(all ? call.a_rows : call.shares.rows(rank));
  const double k = static_cast<double>(call.k), n = static_cast<double>(call.n);
  const auto ranks = static_cast<double>(config.ranks);
  const double copied =
      gathers ? (algo == XD_GEMM_ALGO_SEQUENTIAL ? own + rows : own) * k *
                    static_cast<double>(dtype_bytes(call.a.type))
              : (rows + ranks * own) * n * static_cast<double>(dtype_bytes(call.wide_type()));
  return {2 * rows * k * n / speed.flops, copied / speed.copied_bytes};
}

}  // namespace

const char* obstacle(xd_gemm_operation operation, xd_gemm_algo algo) {
  switch (algo) {
    case XD_GEMM_ALGO_FUSED:
      return "reserved: no executor has one kernel that computes and sends";
    case XD_GEMM_ALGO_DIRECT:
      if (operation == XD_GEMM_ALL_GATHER) return "exists for reduce_scatter and all_reduce only";
      if (operation == XD_GEMM_ALL_REDUCE) {
        return "not on the CPU: every rank needs all rows, and reads its peers' terms where they "
               "lie";
      }
      return nullptr;
    case XD_GEMM_ALGO_SPLIT:
    case XD_GEMM_ALGO_SPLIT_P2P:
      if (operation == XD_GEMM_ALL_REDUCE) return "exists for all_gather and reduce_scatter only";
      return nullptr;
    default:
      return nullptr;
  }
}

xd_gemm_algo choose(const Config& config, const ProductCall& call) {
  if (call.algo == XD_GEMM_ALGO_AUTO) return fastest(call.operation);
  const char* const why = obstacle(call.operation, call.algo);
  if (why == nullptr) return call.algo;
  if (config.allow_fallback) return fastest(call.operation);
  fail(XD_ERROR_UNSUPPORTED, "algo = XD_GEMM_ALGO_", algo_name(call.algo), ": ", why);
}

xd_gemm_plan_info explain(const Config& config, const ProductCall& call, const Speed& speed,
                          int rank) {
  xd_gemm_plan_info info XD_GEMM_PLAN_INFO_INIT;
  info.algo = choose(config, call);
  const bool one = call.operation == XD_GEMM_ALL_REDUCE;
  info.num_products = one ? 1 : config.ranks;
  info.same_bits = 1;
  const Estimate chosen = estimate(config, call, info.algo, speed, rank);
  info.gemm_us = chosen.gemm_us;
  info.transfer_us = chosen.transfer_us;
  info.estimate_us = chosen.gemm_us + chosen.transfer_us;
  std::size_t length = 0;
  for (const xd_gemm_algo algo : kAlgos) {
    const char* const why = obstacle(call.operation, algo);
    const Estimate e = estimate(config, call, algo, speed, rank);
    const std::size_t room = sizeof(info.text) - length;
    const int wrote =
        why != nullptr ? std::snprintf(info.text + length, room, "%s: %s\n", algo_name(algo), why)
                       : std::snprintf(info.text + length, room, "%s: %.1f us\n", algo_name(algo),
                                       e.gemm_us + e.transfer_us);
    length = std::min(sizeof(info.text) - 1, length + at(std::max(0, wrote)));
  }
  return info;
}

}  // namespace xd::gemm::cpu
