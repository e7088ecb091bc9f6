// Configs: what is refused, and in which words; and tensors that are taken.
#include "ep/plan/config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>

#include "base/tensor.h"
#include "unit/errors.h"

namespace xd::ep {
namespace {

xd_ep_config good_config() {
  xd_ep_config config XD_EP_CONFIG_INIT;
  config.num_ranks = 4;
  config.num_experts = 16;
  config.max_topk = 3;
  config.max_tokens_per_rank = 10;
  config.hidden = 64;
  return config;
}

TEST(ConfigTest, FillsInDefaults) {
  const xd_ep_config user = good_config();
  const Config config = read_config(&user, 0);
  EXPECT_EQ(config.local_experts, 4);
  EXPECT_EQ(config.expert_tables.hash(), 0u);
  EXPECT_EQ(config.alignment, 1);
  EXPECT_EQ(config.max_row_bytes, 128u);
  EXPECT_EQ(config.capacity, 4 * 10 * 3);
  EXPECT_TRUE(config.staging);
}

// Sizes that follow from L are those of the rank with the most experts.
TEST(ConfigTest, TakesTheLargestNumberOfExpertsOfAnyRank) {
  xd_ep_config user = good_config();
  user.num_experts = 5;
  constexpr std::array<std::int32_t, 5> kRanks = {2, 0, 2, 2, 0};
  user.expert_ranks = kRanks.data();
  const Config config = read_config(&user, 0);
  EXPECT_EQ(config.most_local_experts(), 3);
  EXPECT_EQ(config.local_experts, 3);
  EXPECT_EQ(config.capacity, 4 * 10 * 3);
  EXPECT_NE(config.expert_tables.hash(), 0u);
}

constexpr std::array<std::int32_t, 16> kOneTooHigh = {0, 1, 2, 3, 0, 1, 2, 4};
constexpr std::array<std::int32_t, 16> kOneNegative = {-1};

struct BadField {
  const char* text;
  void (*spoil)(xd_ep_config&);
};

TEST(ConfigTest, NamesTheFieldThatIsWrong) {
  const std::array bad = {
      BadField{"config.num_ranks = 0", [](xd_ep_config& c) { c.num_ranks = 0; }},
      BadField{"config.num_experts = 18, expected a multiple of num_ranks = 4",
               [](xd_ep_config& c) { c.num_experts = 18; }},
      BadField{"config.num_experts = 0, expected 1 to 65536",
               [](xd_ep_config& c) { c.num_experts = 0; }},
      BadField{"config.expert_ranks[7] = 4, expected a rank, 0 to 3",
               [](xd_ep_config& c) { c.expert_ranks = kOneTooHigh.data(); }},
      BadField{"config.expert_ranks[0] = -1, expected a rank, 0 to 3",
               [](xd_ep_config& c) { c.expert_ranks = kOneNegative.data(); }},
      BadField{"config.max_topk = 33, expected 1 to 32", [](xd_ep_config& c) { c.max_topk = 33; }},
      BadField{"config.max_tokens_per_rank = 0",
               [](xd_ep_config& c) { c.max_tokens_per_rank = 0; }},
      BadField{"config.hidden = 63", [](xd_ep_config& c) { c.hidden = 63; }},
      BadField{"config.dtype = int32",
               [](xd_ep_config& c) {
                 c.dtype = {kDLInt, 32, 1};
               }},
      BadField{"config.dtype = type (code 8",
               [](xd_ep_config& c) {
                 c.dtype = {8, 8, 1};
               }},
      BadField{"config.alignment = 3", [](xd_ep_config& c) { c.alignment = 3; }},
      BadField{"config.recv_capacity = 3, expected 0 or at least alignment = 4",
               [](xd_ep_config& c) {
                 c.alignment = 4;
                 c.recv_capacity = 3;
               }},
      BadField{"config.on_error = -1",
               [](xd_ep_config& c) { c.on_error = static_cast<xd_ep_on_error>(-1); }},
      BadField{"config.duplicate_ids = 2",
               [](xd_ep_config& c) { c.duplicate_ids = static_cast<xd_ep_duplicate_ids>(2); }},
      BadField{"config.max_scale_bytes = -1", [](xd_ep_config& c) { c.max_scale_bytes = -1; }},
      BadField{"config.layout = 7",
               [](xd_ep_config& c) { c.layout = static_cast<xd_ep_layout>(7); }},
      BadField{"config.zero_tail = 2", [](xd_ep_config& c) { c.zero_tail = 2; }},
      BadField{"config.net_buffer_bytes = -1, expected 0 to 4611686018427387904",
               [](xd_ep_config& c) { c.net_buffer_bytes = -1; }},
      BadField{"config.struct_size = 3", [](xd_ep_config& c) { c.struct_size = 3; }},
  };
  for (const BadField& field : bad) {
    xd_ep_config config = good_config();
    field.spoil(config);
    test::expect_error(test::error_of([&] { read_config(&config, 0); }), XD_ERROR_INVALID_ARGUMENT,
                       field.text);
  }
  const xd_ep_config config = good_config();
  test::expect_error(test::error_of([&] { read_config(&config, 3); }), XD_ERROR_INVALID_ARGUMENT,
                     "the communicator's 3");
}

// The largest padded sum that `experts` zones can reach: every zone's count is tried.
std::int64_t largest_padded(int experts, std::int64_t tokens, std::int64_t rows,
                            std::int64_t alignment) {
  if (experts == 0) return 0;
  std::int64_t largest = 0;
  for (std::int64_t here = 0; here <= std::min(tokens, rows); ++here) {
    const std::int64_t padded = (here + alignment - 1) / alignment * alignment;
    largest =
        std::max(largest, padded + largest_padded(experts - 1, tokens, rows - here, alignment));
  }
  return largest;
}

TEST(ConfigTest, RecvBoundIsWhatTheWorstRoutingNeeds) {
  for (const int alignment : {1, 2, 4, 8, 128}) {
    for (const int local : {1, 2, 4}) {
      for (const int topk : {1, 2, 3, 8}) {
        for (const int tokens : {1, 2, 3}) {
          xd_ep_config user = good_config();
          user.alignment = alignment;
          user.num_experts = 4 * local;
          user.max_topk = topk;
          user.max_tokens_per_rank = tokens;
          const std::int64_t all = std::int64_t{4} * tokens;
          EXPECT_EQ(recv_bound(read_config(&user, 0)),
                    largest_padded(local, all, all * std::min(topk, local), alignment))
              << "alignment " << alignment << " local experts " << local << " topk " << topk
              << " tokens " << tokens;
        }
      }
    }
  }
}

class TensorTest : public testing::Test {
 protected:
  Tensor read(const DLTensor* t, bool optional = false) {
    static constexpr std::array types = {DType::f32, DType::bf16};
    return read_tensor(
        t, {.name = "x", .ndim = 2, .types = types, .device = {kDLCPU, 0}, .optional = optional});
  }

  alignas(16) float data_[64] = {};
  std::array<std::int64_t, 2> shape_ = {3, 4};
  std::array<std::int64_t, 2> strides_ = {4, 1};
  DLTensor tensor_{.data = data_,
                   .device = {kDLCPU, 0},
                   .ndim = 2,
                   .dtype = {kDLFloat, 32, 1},
                   .shape = shape_.data(),
                   .strides = strides_.data(),
                   .byte_offset = 0};
};

TEST_F(TensorTest, ReadsWhatIsThere) {
  tensor_.byte_offset = 16;
  const Tensor got = read(&tensor_);
  EXPECT_EQ(got.rows, 3);
  EXPECT_EQ(got.cols, 4);
  EXPECT_EQ(got.data, reinterpret_cast<std::byte*>(data_) + 16);
  EXPECT_EQ(got.row_bytes(), 16u);
  EXPECT_FALSE(read(nullptr, true));
}

TEST_F(TensorTest, StridesOfExtentOneAreNotLookedAt) {
  shape_ = {1, 4};
  strides_ = {77, 1};
  EXPECT_TRUE(read(&tensor_));
}

}  // namespace
}  // namespace xd::ep
