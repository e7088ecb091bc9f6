// A gather that a context of products begins, and a config of contexts that can.
#pragma once

#include <crossdock/gemm.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/tensor.h"
#include "support/world.h"

namespace xd::test {

// All operations, for tensors such as those of plain_gemm_case() and Gather.
inline xd_gemm_config gathering_config() {
  xd_gemm_config config = XD_GEMM_CONFIG_INIT;
  config.operations = XD_GEMM_BIT(XD_GEMM_START_ALL_GATHER) | XD_GEMM_BIT(XD_GEMM_ALL_GATHER) |
                      XD_GEMM_BIT(XD_GEMM_REDUCE_SCATTER) | XD_GEMM_BIT(XD_GEMM_ALL_REDUCE);
  config.max_tokens = 6;
  config.max_k = config.max_n = 640;
  return config;
}

// A gather whose rows have their rank's number in all bytes.
class Gather {
 public:
  explicit Gather(const Rank& rank)
      : rank_(rank), in_(rank, kU8, {kRows, kColumns}), out_(rank, kU8, {all(), kColumns}) {
    in_.buffer().fill(number_of(rank.rank));
  }
  xd_status start(xd_gemm_context* context) {
    xd_gemm_gather_args args = XD_GEMM_GATHER_ARGS_INIT;
    args.in = in_.dl();
    args.out = out_.dl();
    return xd_gemm_start_all_gather(context, &args, rank_.stream());
  }
  void check() {
    const std::vector<std::byte> got = out_.read();
    constexpr auto kOfRank = static_cast<std::size_t>(kRows * kColumns);
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], number_of(static_cast<int>(i / kOfRank))) << "byte " << i;
    }
    out_.buffer().fill(kPoison);
  }

 private:
  static constexpr std::int64_t kRows = 6, kColumns = 64;
  static std::byte number_of(int rank) { return static_cast<std::byte>(rank + 1); }
  std::int64_t all() const { return kRows * rank_.num_ranks; }

  const Rank& rank_;
  Tensor in_, out_;
};

}  // namespace xd::test
