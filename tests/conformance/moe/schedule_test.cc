// The schedule and the memory of a layer by its sizes alone.
#include <crossdock/moe.h>
#include <gtest/gtest.h>

#include <string>

#include "conformance/said.h"
#include "support/handles.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

// Columns of an expert whose products take about as long as transfers between eight ranks.
constexpr std::int32_t kFfn = 1024;

// 256 experts of a large model, eight for each token.
xd_ep_config large(int num_ranks) {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = num_ranks;
  config.num_experts = 256;
  config.max_topk = 8;
  config.max_tokens_per_rank = 4096;
  config.hidden = 7168;
  config.device_type = kDLCUDA;
  return config;
}

xd_moe_overlap schedule_of(const xd_ep_config& config, std::int32_t tokens = 0,
                           std::int32_t ffn = kFfn) {
  xd_moe_overlap overlap = XD_MOE_OVERLAP_INIT;
  ok(xd_moe_schedule(&config, ffn, tokens, &overlap));
  return overlap;
}

void expect_serial(const xd_ep_config& config, std::int32_t tokens = 0, std::int32_t ffn = kFfn) {
  const xd_moe_overlap overlap = schedule_of(config, tokens, ffn);
  EXPECT_EQ(overlap.parts, 0);
  EXPECT_EQ(overlap.num_sms, 0);
  EXPECT_EQ(overlap.predicted_ratio, 1.0);
}

TEST(MoeSchedule, TakesPartsWhereTransfersWeigh) {
  const xd_moe_overlap four = schedule_of(large(4), 0, kFfn / 2), eight = schedule_of(large(8));
  EXPECT_GE(four.parts, 4);
  EXPECT_NEAR(four.predicted_ratio, 0.955, 0.01);
  EXPECT_EQ(eight.parts, 4);
  EXPECT_NEAR(eight.predicted_ratio, 0.937, 0.01);
  EXPECT_EQ(eight.num_sms, 22);
  EXPECT_EQ(schedule_of(large(8), 0, kFfn / 2).num_sms, 44);
}

TEST(MoeSchedule, IsSerialWhereNothingWouldBeGained) {
  // Products that take longer than transfers slow down without pauses by what overlap would gain.
  expect_serial(large(8), 0, 2 * kFfn);
  expect_serial(large(4));
  expect_serial(large(1));
  expect_serial(large(2));
  expect_serial(large(16));     // several machines
  expect_serial(large(8), 64);  // products read their matrices, and take long without rows
  xd_ep_config config = large(8);
  config.device_type = kDLCPU;
  expect_serial(config);
  config = large(8);
  config.num_experts = 8;  // a part has an expert at least
  expect_serial(config);
  config = large(8);
  config.dtype = kF32;  // has no products on devices
  expect_serial(config);
}

TEST(MoeSchedule, KeepsWithinTheGroups) {
  xd_ep_config config = large(8);
  config.num_experts = 24;
  EXPECT_EQ(schedule_of(config, 0, kFfn / 2).parts, 2);
  config = large(8);
  config.num_sms = 12;
  EXPECT_EQ(schedule_of(config).num_sms, 12);
}

TEST(MoeSizes, AreTheBytesOfTheTensorsBetweenOperations) {
  xd_ep_config config = large(8);
  config.recv_capacity = 1000;
  xd_moe_memory memory = XD_MOE_MEMORY_INIT;
  ok(xd_moe_sizes(&config, kFfn, &memory));
  EXPECT_EQ(memory.rows, 1000);
  EXPECT_EQ(memory.row_tensor_bytes, 1000u * 7168 * 2);
  EXPECT_EQ(memory.kept_bytes, 1000u * (2 * 7168 * 2 + 3 * kFfn * 2 + 4));
  EXPECT_EQ(memory.backward_bytes, memory.kept_bytes);
}

TEST(MoeSizes, AndSchedulesRefuseByNameWhatDoesNotFit) {
  xd_moe_memory memory = XD_MOE_MEMORY_INIT;
  xd_moe_overlap overlap = XD_MOE_OVERLAP_INIT;
  const auto refused = [&](const xd_ep_config& config, std::int32_t ffn, const char* words) {
    expect_error(xd_moe_sizes(&config, ffn, &memory), XD_ERROR_INVALID_ARGUMENT, words);
    expect_error(xd_moe_schedule(&config, ffn, 0, &overlap), XD_ERROR_INVALID_ARGUMENT, words);
  };
  const xd_ep_config good = large(8);
  refused(good, 0, "ffn = 0, expected 1");
  refused(good, 12, "ffn = 12");
  xd_ep_config config = good;
  config.layout = XD_EP_RANK_MAJOR;
  refused(config, kFfn, "config.layout: is RANK_MAJOR, expected EXPERT_MAJOR");
  config = good;
  config.dtype = kE4m3;
  refused(config, kFfn, "config.dtype: is float8_e4m3fn, expected bfloat16, float16 or float32");
  config = good;
  config.max_topk = 0;
  refused(config, kFfn, "config.max_topk = 0");
  for (const std::int32_t tokens : {-1, 4097}) {
    expect_error(
        xd_moe_schedule(&good, kFfn, tokens, &overlap), XD_ERROR_INVALID_ARGUMENT,
        "tokens = " + std::to_string(tokens) + ", expected 0 to max_tokens_per_rank = 4096");
  }
  expect_error(xd_moe_sizes(nullptr, kFfn, &memory), XD_ERROR_INVALID_ARGUMENT, "config = NULL");
  expect_error(xd_moe_sizes(&good, kFfn, nullptr), XD_ERROR_INVALID_ARGUMENT, "memory = NULL");
  expect_error(xd_moe_schedule(&good, kFfn, 0, nullptr), XD_ERROR_INVALID_ARGUMENT,
               "overlap = NULL");
}

}  // namespace
}  // namespace xd::test
