// Configs of groups and contexts: which are bad, which differ between ranks, and who hears of it.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "conformance/families/mistakes.h"
#include "conformance/one_mistake.h"

namespace xd::test {
namespace {

template <class F>
class Config : public testing::Test {};
TYPED_TEST_SUITE(Config, Families, FamilyName);

// A change of a good config, and what a text about it must have: the field, and at times the value.
template <class C>
struct Change {
  const char* field;
  void (*make)(C&);
  const char* value = "";
};
using EpChange = Change<xd_ep_config>;
using LlChange = Change<xd_ll_config>;
using GemmChange = Change<xd_gemm_config>;

// ---- Fields that are bad by themselves ----------------------------------------------------------

template <class F>
std::vector<Change<typename F::Config>> bad_fields();

template <>
std::vector<EpChange> bad_fields<Bulk>() {
  return {
      {"num_experts", [](xd_ep_config& c) { c.num_experts += c.num_ranks > 1 ? 1 : -1000; }},
      {"layout", [](xd_ep_config& c) { force(c.layout, 2); }},
      {"num_logical_experts", [](xd_ep_config& c) { c.num_logical_experts = c.num_experts + 1; }},
      {"wire_formats", [](xd_ep_config& c) { c.wire_formats = 1u << 31; }, "2147483648"},
  };
}

void give_alignment(xd_ll_config& c, std::int32_t alignment) {
  c.receive = XD_LL_BY_EXPERT;
  c.alignment = alignment;
}

template <>
std::vector<LlChange> bad_fields<LowLatency>() {
  return {
      {"max_tokens_per_rank",
       [](xd_ll_config& c) { c.max_tokens_per_rank = XD_LL_MAX_TOKENS + 1; }},
      {"in_flight", [](xd_ll_config& c) { c.in_flight = 1; }},
      {"in_flight", [](xd_ll_config& c) { c.in_flight = 5; }},
      {"in_flight", [](xd_ll_config& c) { c.in_flight = -1; }},
      {"wait_timeout_ms", [](xd_ll_config& c) { c.wait_timeout_ms = -1; }},
      {"on_peer_loss", [](xd_ll_config& c) { force(c.on_peer_loss, 2); }},
      {"dtype", [](xd_ll_config& c) { c.dtype = kE4m3; }},
      {"dtype", [](xd_ll_config& c) { c.dtype = kU8; }},
      {"hidden", [](xd_ll_config& c) { c.hidden = 12; }},
      {"dtype",
       [](xd_ll_config& c) {
         c.dtype = {kDLFloat, 64, 1};
       }},
      {"duplicate_ids", [](xd_ll_config& c) { force(c.duplicate_ids, 2); }},
      {"on_error", [](xd_ll_config& c) { force(c.on_error, 2); }},
      {"num_sms", [](xd_ll_config& c) { c.num_sms = -1; }},
      {"num_experts", [](xd_ll_config& c) { c.num_experts = 0; }},
      {"max_topk", [](xd_ll_config& c) { c.max_topk = XD_EP_MAX_TOPK + 1; }},
      {"wire_formats", [](xd_ll_config& c) { c.wire_formats = 32; }, "32"},
      {"num_logical_experts", [](xd_ll_config& c) { c.num_logical_experts = -1; }, "-1"},
      {"receive", [](xd_ll_config& c) { force(c.receive, 3); }},
      {"receive", [](xd_ll_config& c) { force(c.receive, -1); }},
      {"alignment", [](xd_ll_config& c) { c.alignment = 2; }},
      {"alignment", [](xd_ll_config& c) { give_alignment(c, 3); }},
      {"alignment", [](xd_ll_config& c) { give_alignment(c, 1 << 21); }},
      {"alignment", [](xd_ll_config& c) { give_alignment(c, -1); }},
  };
}

template <>
std::vector<GemmChange> bad_fields<Products>() {
  return {
      {"struct_size", [](xd_gemm_config& c) { c.struct_size = 0; }, "0"},
      {"operations", [](xd_gemm_config& c) { c.operations = 32; }, "32"},
      {"operations", [](xd_gemm_config& c) { c.operations = -1; }, "-1"},
      {"max_tokens", [](xd_gemm_config& c) { c.max_tokens = 0; }, "0"},
      {"max_tokens", [](xd_gemm_config& c) { c.max_tokens = -5; }, "-5"},
      {"max_tokens", [](xd_gemm_config& c) { c.max_tokens = (1 << 26) + 1; }, "67108865"},
      {"max_k", [](xd_gemm_config& c) { c.max_k = 0; }, "0"},
      {"max_k", [](xd_gemm_config& c) { c.max_k = -8; }, "-8"},
      {"max_n", [](xd_gemm_config& c) { c.max_n = 0; }, "0"},
      {"dtype",
       [](xd_gemm_config& c) {
         c.dtype = {kDLFloat, 64, 1};
       },
       "64 bits"},
      {"dtype",
       [](xd_gemm_config& c) {
         c.dtype = {kDLInt, 32, 1};
       },
       "int32"},
      {"algo", [](xd_gemm_config& c) { force(c.algo, 4); }, "4"},
      {"algo", [](xd_gemm_config& c) { force(c.algo, 23); }, "23"},
      {"algo", [](xd_gemm_config& c) { force(c.algo, -1); }, "-1"},
      {"num_comm_sms", [](xd_gemm_config& c) { c.num_comm_sms = -1; }, "-1"},
      {"keep_gathered", [](xd_gemm_config& c) { c.keep_gathered = 2; }, "2"},
      {"allow_fallback", [](xd_gemm_config& c) { c.allow_fallback = -1; }, "-1"},
      {"device_type", [](xd_gemm_config& c) { c.device_type = 7; }, "7"},
  };
}

TYPED_TEST(Config, ThatIsBadIsRefusedByThePureFunctionsWithTheFieldsName) {
  for (const auto& bad : bad_fields<TypeParam>()) {
    SCOPED_TRACE(std::string(bad.field) + " " + bad.value);
    auto config = TypeParam::good_config(0);
    bad.make(config);
    for (const auto& [status, text] : TypeParam::read_config(config)) {
      EXPECT_EQ(status, XD_ERROR_INVALID_ARGUMENT);
      expect_words(text, {bad.field, bad.value});
    }
  }
}

// Expects `status` and no handle from a collective creation.
template <class F>
void expect_none_made(const Rank& rank, const typename F::Config& config, xd_status status,
                      const Words& words) {
  int no_handle = 0;
  auto* made = reinterpret_cast<typename F::Raw*>(&no_handle);
  EXPECT_EQ(F::create(rank.comm, &config, &made), status) << xd_last_error();
  expect_words(xd_last_error(), words);
  EXPECT_EQ(made, nullptr);
}

// The same where only one rank has it, and with what can be wrong for a communicator alone.
TYPED_TEST(Config, ThatIsBadOnOneRankIsAnErrorOfAll) {
  using F = TypeParam;
  on_every_rank([](Rank& rank) {
    const auto expect_refused = [&](const char* field, const char* value, auto&& make) {
      SCOPED_TRACE(std::string(field) + " " + value);
      auto config = F::good_config(rank.rank);
      if (!is_guilty(rank)) {
        return expect_none_made<F>(rank, config, XD_ERROR_MISMATCH,
                                   {"rank " + std::to_string(guilty_rank(rank))});
      }
      make(config);
      expect_none_made<F>(rank, config, XD_ERROR_INVALID_ARGUMENT, {field, value});
    };
    for (const auto& bad : bad_fields<F>()) expect_refused(bad.field, bad.value, bad.make);
    expect_refused("num_ranks", "", [&](auto& config) { config.num_ranks = rank.num_ranks + 1; });
    const bool cpu = rank.memory->device().device_type == kDLCPU;
    expect_refused("device_type", "",
                   [&](auto& config) { config.device_type = cpu ? kDLCUDA : kDLCPU; });
    const auto handle = F::make_roomy(rank);
    F::expect_works(rank, F::plain(), handle.get());
  });
}

// ---- Fields that ranks must have alike ----------------------------------------------------------

template <class F>
std::vector<Change<typename F::Config>> common_fields();

template <>
std::vector<EpChange> common_fields<Bulk>() {
  return {
      {"num_experts", [](xd_ep_config& c) { c.num_experts *= 2; }},
      {"max_topk", [](xd_ep_config& c) { c.max_topk += 1; }},
      {"max_tokens_per_rank", [](xd_ep_config& c) { c.max_tokens_per_rank += 1; }},
      {"hidden", [](xd_ep_config& c) { c.hidden += 8; }},
      {"max_scale_bytes", [](xd_ep_config& c) { c.max_scale_bytes += 4; }},
      {"layout", [](xd_ep_config& c) { c.layout = XD_EP_RANK_MAJOR; }},
      {"alignment", [](xd_ep_config& c) { c.alignment = 8; }},
      {"overflow", [](xd_ep_config& c) { c.overflow = XD_EP_OVERFLOW_DROP; }},
      {"on_error", [](xd_ep_config& c) { c.on_error = XD_EP_ON_ERROR_FATAL; }},
      {"duplicate_ids", [](xd_ep_config& c) { c.duplicate_ids = XD_EP_DUPLICATE_IDS_COLLAPSE; }},
      {"num_logical_experts", [](xd_ep_config& c) { c.num_logical_experts = 1; }},
      {"net_buffer_bytes", [](xd_ep_config& c) { c.net_buffer_bytes = 1 << 20; }},
      {"wire_formats",
       [](xd_ep_config& c) { c.wire_formats = XD_EP_WIRE_BIT(XD_EP_WIRE_FLOAT32); }},
      {"expert_ranks",
       [](xd_ep_config& c) {
         static const std::vector<std::int32_t> all_on_rank_0(4096, 0);
         c.expert_ranks = all_on_rank_0.data();
       }},
  };
}

template <>
std::vector<LlChange> common_fields<LowLatency>() {
  return {
      {"in_flight", [](xd_ll_config& c) { c.in_flight = 3; }},
      {"num_logical_experts", [](xd_ll_config& c) { c.num_logical_experts = 1; }},
      {"receive", [](xd_ll_config& c) { c.receive = XD_LL_BY_RANK; }},
      {"wire_formats",
       [](xd_ll_config& c) { c.wire_formats = XD_EP_WIRE_BIT(XD_EP_WIRE_FP8_BLOCK128); }},
      {"on_peer_loss", [](xd_ll_config& c) { c.on_peer_loss = XD_LL_PEER_LOSS_MASK; }},
      {"wait_timeout_ms", [](xd_ll_config& c) { c.wait_timeout_ms = 100; }},
      {"max_tokens_per_rank", [](xd_ll_config& c) { c.max_tokens_per_rank += 1; }},
      {"on_error", [](xd_ll_config& c) { c.on_error = XD_EP_ON_ERROR_FATAL; }},
      {"duplicate_ids", [](xd_ll_config& c) { c.duplicate_ids = XD_EP_DUPLICATE_IDS_COLLAPSE; }},
  };
}

template <>
std::vector<GemmChange> common_fields<Products>() {
  return {
      {"operations", [](xd_gemm_config& c) { c.operations |= XD_GEMM_BIT(XD_GEMM_ALL_REDUCE); }},
      {"max_tokens", [](xd_gemm_config& c) { c.max_tokens += 1; }},
      {"max_k", [](xd_gemm_config& c) { c.max_k += 8; }},
      {"max_n", [](xd_gemm_config& c) { c.max_n += 8; }},
      {"dtype", [](xd_gemm_config& c) { c.dtype = kF16; }},
      {"algo", [](xd_gemm_config& c) { c.algo = XD_GEMM_ALGO_SEQUENTIAL; }},
      {"keep_gathered", [](xd_gemm_config& c) { c.keep_gathered = 1; }},
      {"allow_fallback", [](xd_gemm_config& c) { c.allow_fallback = 1; }},
  };
}

// Fields that may differ.
void differ(xd_ep_config& config, const Rank& rank) {
  config.num_ranks = rank.rank % 2 == 0 ? 0 : rank.num_ranks;
  config.zero_tail = rank.rank % 2;
  config.num_sms = rank.rank;
  config.staging = rank.rank % 2 == 0 ? XD_EP_STAGING_AUTO : XD_EP_STAGING_NONE;
  config.recv_capacity = 400 + 5 * std::int64_t{rank.rank};
}
void differ(xd_ll_config& config, const Rank& rank) {
  config.num_ranks = rank.rank % 2 == 0 ? 0 : rank.num_ranks;
}
void differ(xd_gemm_config& config, const Rank& rank) {
  config.num_ranks = rank.rank % 2 == 0 ? 0 : rank.num_ranks;
  config.num_comm_sms = rank.rank;
}

// Uses a handle of ranks whose configs differ so.
void expect_use(const Rank&, xd_ep_group* group) { EXPECT_NE(group, nullptr); }
void expect_use(const Rank&, xd_ll_group* group) { EXPECT_NE(group, nullptr); }
void expect_use(const Rank& rank, xd_gemm_context* context) {
  GemmBatch(rank, Products::plain(), 0).call_and_check(context);
}

TYPED_TEST(Config, ThatDiffersBetweenRanksIsAMismatchThatNamesTheField) {
  using F = TypeParam;
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  on_every_rank([](Rank& rank) {
    for (const auto& field : common_fields<F>()) {
      SCOPED_TRACE(field.field);
      auto config = F::good_config(rank.rank);
      if (rank.rank == 0) field.make(config);
      expect_none_made<F>(rank, config, XD_ERROR_MISMATCH, {field.field});
    }
    // The communicator works after all of this.
    auto config = F::good_config(rank.rank);
    differ(config, rank);
    typename F::Raw* made = nullptr;
    ok(F::create(rank.comm, &config, &made));
    const typename F::Handle handle(made);
    expect_use(rank, made);
    const auto alike = F::make_roomy(rank);
    F::expect_works(rank, F::plain(), alike.get());
  });
}

TYPED_TEST(Config, WithoutAPlaceForTheHandleIsToldToAllRanksAtOnce) {
  using F = TypeParam;
  on_every_rank([](Rank& rank) {
    const auto config = F::good_config(rank.rank);
    expect_mistake<typename F::Raw*>(
        rank, std::string(F::kHandle) + " = NULL", nullptr,
        [&](typename F::Raw**) { return F::create(rank.comm, &config, nullptr); },
        [&](typename F::Raw** made) { return F::create(rank.comm, &config, made); });
    const auto handle = F::make_roomy(rank);
    F::expect_works(rank, F::plain(), handle.get());
  });
}

}  // namespace
}  // namespace xd::test
