#include "gemm/cpu/plan.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include "base/error.h"
#include "gemm/cpu/memory.h"

namespace xd::gemm::cpu {
namespace {

// Among equals the first one is taken.
constexpr std::array kAlgos = {XD_GEMM_ALGO_SPLIT, XD_GEMM_ALGO_SEQUENTIAL, XD_GEMM_ALGO_DIRECT,
                               XD_GEMM_ALGO_CUBLASMP};

// A tile takes so long as if it had so many rows more: oneDNN rearranges b for each.
constexpr double kRowsOfATile = 32;
// And a product as if it had so many more.
constexpr double kRowsOfAProduct = 8;
// A byte takes as long to copy as so many floating-point operations of a product.
constexpr double kFlopOfACopiedByte = 12;

std::int64_t rows_of(const ProductCall& call) {
  return call.operation == XD_GEMM_ALL_GATHER ? call.shares.all() : call.a_rows;
}

std::int64_t tiles_of(std::int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// The rows that a product of so many takes as long as.
double rows_of_product(std::int64_t rows) {
  if (rows == 0) return 0;
  return static_cast<double>(rows) + kRowsOfATile * static_cast<double>(tiles_of(rows)) +
         kRowsOfAProduct;
}

// Likewise of all products of an algorithm.
double rows_of_products(const Config& config, const ProductCall& call, xd_gemm_algo algo) {
  if (algo == XD_GEMM_ALGO_SEQUENTIAL) return rows_of_product(rows_of(call));
  double sum = 0;
  for (int r = 0; r < config.ranks; ++r) sum += rows_of_product(call.shares.rows(r));
  return sum;
}

// Floating-point operations that take as long.
struct Cost {
  double gemm, transfer;
  double all() const { return gemm + transfer; }
};

// The transfer is that of a rank with most rows.
Cost cost(const Config& config, const ProductCall& call, xd_gemm_algo algo) {
  const auto rows = static_cast<double>(rows_of(call));
  const double k = static_cast<double>(call.k), n = static_cast<double>(call.n);
  std::int64_t most = call.a_rows;
  if (call.operation != XD_GEMM_ALL_REDUCE) {
    most = 0;
    for (int r = 0; r < config.ranks; ++r) most = std::max(most, call.shares.rows(r));
  }
  const auto own = static_cast<double>(most);
  const double copied =
      call.operation == XD_GEMM_ALL_GATHER
          ? (algo == XD_GEMM_ALGO_SEQUENTIAL ? own + rows : own) * k *
                static_cast<double>(dtype_bytes(call.a.type))
          : (rows + config.ranks * own) * n * static_cast<double>(dtype_bytes(call.wide_type()));
  return {2 * rows_of_products(config, call, algo) * k * n, copied * kFlopOfACopiedByte};
}

xd_gemm_algo fastest(const Config& config, const ProductCall& call) {
  xd_gemm_algo best = XD_GEMM_ALGO_SEQUENTIAL;
  double least = std::numeric_limits<double>::infinity();
  for (const xd_gemm_algo algo : kAlgos) {
    if (obstacle(call.operation, algo) != nullptr) continue;
    const double all = cost(config, call, algo).all();
    if (all < least) {
      least = all;
      best = algo;
    }
  }
  return best;
}

// Whether one product of all rows is that of some rank's rows.
bool rows_are_one_ranks(const Config& config, const ProductCall& call) {
  for (int r = 0; r < config.ranks; ++r) {
    if (call.shares.rows(r) == call.shares.all()) return true;
  }
  return false;
}

}  // namespace

const char* obstacle(xd_gemm_operation operation, xd_gemm_algo algo) {
  if (is_cublasmp(algo) || algo == XD_GEMM_ALGO_DIRECT) return "needs CUDA devices";
  if (algo == XD_GEMM_ALGO_SPLIT && operation != XD_GEMM_ALL_GATHER) {
    return "exists on the CPU for all_gather only: sums copy as much by it";
  }
  return nullptr;
}

xd_gemm_algo choose(const Config& config, const ProductCall& call) {
  if (call.algo == XD_GEMM_ALGO_AUTO) return fastest(config, call);
  const char* const why = obstacle(call.operation, call.algo);
  if (why == nullptr) return call.algo;
  if (config.allow_fallback) return fastest(config, call);
  fail(XD_ERROR_UNSUPPORTED, "algo = XD_GEMM_ALGO_", algo_name(call.algo), ": ", why);
}

xd_gemm_plan_info explain(const Config& config, const ProductCall& call, double flops) {
  xd_gemm_plan_info info XD_GEMM_PLAN_INFO_INIT;
  info.algo = choose(config, call);
  const bool one = info.algo == XD_GEMM_ALGO_SEQUENTIAL;
  info.num_products = one ? 1 : config.ranks;
  info.same_bits = !one || call.operation != XD_GEMM_ALL_GATHER || rows_are_one_ranks(config, call);
  const Cost chosen = cost(config, call, info.algo);
  info.gemm_us = chosen.gemm / flops;
  info.transfer_us = chosen.transfer / flops;
  info.estimate_us = chosen.all() / flops;
  std::size_t length = 0;
  for (const xd_gemm_algo algo : kAlgos) {
    const char* const why = obstacle(call.operation, algo);
    const std::size_t room = sizeof(info.text) - length;
    const int wrote =
        why != nullptr ? std::snprintf(info.text + length, room, "%s: %s\n", algo_name(algo), why)
                       : std::snprintf(info.text + length, room, "%s: %.1f us\n", algo_name(algo),
                                       cost(config, call, algo).all() / flops);
    length = std::min(sizeof(info.text) - 1, length + at(std::max(0, wrote)));
  }
  return info;
}

}  // namespace xd::gemm::cpu
