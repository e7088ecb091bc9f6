// Callers compiled against an older or a newer header than the library's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "abi/frozen_moe.h"
#include "abi/initialised.h"
#include "conformance/said.h"
#include "support/handles.h"

extern "C" int wrong_initialisers_in_c();

namespace xd::test {
namespace {

TEST(Abi, InitialisersKnowTheSizeOfTheirStruct) { EXPECT_EQ(wrong_initialisers_in_c(), 0); }

#if __has_builtin(__builtin_clear_padding)
// Bytes behind the last field of a struct. A caller of that version passes them with anything in
// them, and in a struct of the same size as one in which a field lies there. So they stay padding
// for ever: a new field begins at the size of before, and no line here ever changes.
struct Tail {
  const char* type;
  std::size_t begin, end;
};
constexpr Tail kTails[] = {
    {"xd_comm_config", 132, 136},      {"xd_comm_info", 44, 48},
    {"xd_error_info", 308, 312},       {"xd_ep_config", 124, 128},
    {"xd_ep_dispatch_args", 92, 96},   {"xd_ep_combine_args", 60, 64},
    {"xd_ep_plan_info", 100, 104},     {"xd_ep_planner_args", 60, 64},
    {"xd_ll_combine_args", 68, 72},    {"xd_gemm_bulk_args", 52, 56},
    {"xd_gemm_gather_args", 36, 40},   {"xd_gemm_status", 284, 288},
    {"xd_gemm_view", 44, 48},          {"xd_gated_args", 76, 80},
    {"xd_grouped_outer_args", 52, 56}, {"xd_grouped_product_args", 68, 72},
};

template <class T>
void expect_known_tails(const std::string& type) {
  T fields;
  std::memset(static_cast<void*>(&fields), 0xFF, sizeof(fields));
  __builtin_clear_padding(&fields);
  std::vector<unsigned char> bytes(sizeof(T));
  std::memcpy(bytes.data(), static_cast<const void*>(&fields), sizeof(T));
  std::size_t end = 0;  // of the last field
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    if (bytes[i] != 0) end = i + 1;
  }
  bool is_known = end == sizeof(T);
  for (const Tail& tail : kTails) {
    if (tail.type != type) continue;
    is_known |= tail.begin == end && tail.end == sizeof(T);
    for (std::size_t i = tail.begin; i < tail.end; ++i) {
      EXPECT_EQ(bytes[i], 0) << type << " has a field in byte " << i << ", expected it at "
                             << tail.end;
    }
  }
  EXPECT_TRUE(is_known) << type << " ends in padding from byte " << end << " on";
}

TEST(Abi, NoFieldBeginsInPaddingOfAnOlderVersion) {
#define EXPECT_KNOWN_TAILS(type, init) expect_known_tails<type>(#type);
  XD_INITIALISED(EXPECT_KNOWN_TAILS)
}
#endif

TEST(Abi, TheLoadedLibraryIsTheHeadersVersion) { EXPECT_EQ(xd_version(), XD_VERSION); }

TEST(Abi, StatusNamesAreTheConstantsNames) {
  EXPECT_STREQ(xd_status_name(XD_SUCCESS), "XD_SUCCESS");
  EXPECT_STREQ(xd_status_name(XD_ERROR_PEER_LOST), "XD_ERROR_PEER_LOST");
  EXPECT_STREQ(xd_status_name(XD_ERROR_INTERNAL), "XD_ERROR_INTERNAL");
  EXPECT_STREQ(xd_status_name(static_cast<xd_status>(12)), "XD_UNKNOWN_STATUS");
}

TEST(Abi, UnknownFeaturesAreUnavailable) {
  const char* reason = nullptr;
  EXPECT_EQ(xd_feature_available(static_cast<xd_feature>(99), &reason), 0);
  EXPECT_EQ(xd_feature_available(XD_FEATURE_CPU, &reason), 1);
  EXPECT_STREQ(reason, "available");
  const bool networked = xd_feature_available(XD_FEATURE_NETWORK, &reason) != 0;
  EXPECT_EQ(networked, std::string(reason) == "available");
}

// Callers of this version, of a newer one with longer structs, and of none.
TEST(Abi, AdaptersAreWrittenAtTheCallersDistance) {
  std::int32_t count = 0;
  if (xd_feature_available(XD_FEATURE_NETWORK, nullptr) == 0) {
    EXPECT_EQ(xd_net_adapters(nullptr, sizeof(xd_net_adapter), &count), XD_ERROR_UNSUPPORTED);
    GTEST_SKIP() << xd_last_error();
  }
  ok(xd_net_adapters(nullptr, sizeof(xd_net_adapter), &count));
  ASSERT_GT(count, 0);  // lo at least
  const std::int32_t all = count;
  std::vector<xd_net_adapter> adapters(static_cast<std::size_t>(all));
  ok(xd_net_adapters(adapters.data(), sizeof(xd_net_adapter), &count));
  ASSERT_EQ(count, all);
  const std::size_t longer = sizeof(xd_net_adapter) + 16;
  std::vector<unsigned char> bytes(static_cast<std::size_t>(all) * longer, 0xAB);
  count = all - 1;  // the last one has no room
  ok(xd_net_adapters(reinterpret_cast<xd_net_adapter*>(bytes.data()), longer, &count));
  EXPECT_EQ(count, all);
  for (std::size_t i = 0; i + 1 < adapters.size(); ++i) {
    EXPECT_NE(adapters[i].name[0], 0) << i;
    EXPECT_EQ(std::memcmp(&adapters[i], &bytes[i * longer], sizeof(xd_net_adapter)), 0) << i;
    for (std::size_t b = sizeof(xd_net_adapter); b < longer; ++b)
      EXPECT_EQ(bytes[i * longer + b], 0) << i << ", byte " << b;
  }
  for (std::size_t b = (adapters.size() - 1) * longer; b < bytes.size(); ++b)
    EXPECT_EQ(bytes[b], 0xAB) << b;
  for (const std::size_t size : {std::size_t{0}, sizeof(xd_net_adapter) - 8, longer + 4}) {
    count = all;
    EXPECT_EQ(xd_net_adapters(adapters.data(), size, &count), XD_ERROR_INVALID_ARGUMENT) << size;
    EXPECT_NE(std::string(xd_last_error()).find("adapter_bytes = "), std::string::npos);
    EXPECT_EQ(count, 0);
  }
  count = -1;
  EXPECT_EQ(xd_net_adapters(adapters.data(), sizeof(xd_net_adapter), &count),
            XD_ERROR_INVALID_ARGUMENT);
  count = 1;
  EXPECT_EQ(xd_net_adapters(nullptr, sizeof(xd_net_adapter), &count), XD_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(xd_net_adapters(adapters.data(), sizeof(xd_net_adapter), nullptr),
            XD_ERROR_INVALID_ARGUMENT);
}

xd_ep_config small_config() {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = 1;
  config.num_experts = 2;
  config.max_topk = 1;
  config.max_tokens_per_rank = 4;
  config.hidden = 8;
  config.alignment = 8;
  return config;
}

// A copy of a config as a caller with `size` bytes of it would pass it, in memory of just that size
// so that a sanitizer sees any access past it.
struct OtherVersion {
  OtherVersion(const xd_ep_config& config, std::size_t size) : bytes(size) {
    std::memcpy(bytes.data(), &config, std::min(size, sizeof(config)));
    std::memcpy(bytes.data(), &size, sizeof(size));
  }
  const xd_ep_config* get() const { return reinterpret_cast<const xd_ep_config*>(bytes.data()); }
  std::vector<unsigned char> bytes;
};

std::int64_t bound_of(const xd_ep_config* config) {
  std::int64_t rows = -1;
  ok(xd_ep_recv_bound(config, &rows));
  return rows;
}

TEST(Abi, AnOlderCallersMissingFieldsHaveTheirDefaults) {
  // K = 1, so 4 rows in at most 2 zones. The older caller's `alignment` must not be read.
  const OtherVersion older(small_config(), offsetof(xd_ep_config, alignment));
  EXPECT_EQ(bound_of(older.get()), 4);
  EXPECT_EQ(bound_of(OtherVersion(small_config(), sizeof(xd_ep_config)).get()), 16);
}

TEST(Abi, ANewerCallerMayPassFieldsThatAreZero) {
  EXPECT_EQ(bound_of(OtherVersion(small_config(), sizeof(xd_ep_config) + 24).get()), 16);
}

TEST(Abi, ANewerCallersUnknownFieldIsRefusedAndNotIgnored) {
  OtherVersion newer(small_config(), sizeof(xd_ep_config) + 24);
  newer.bytes[sizeof(xd_ep_config) + 23] = 1;
  std::int64_t rows = -1;
  EXPECT_EQ(xd_ep_recv_bound(newer.get(), &rows), XD_ERROR_INVALID_ARGUMENT);
  expect_words(xd_last_error(), {"struct_size"});
  EXPECT_EQ(rows, -1);
}

TEST(Abi, AStructThatWasNotInitialisedIsRefused) {
  xd_ep_config config = small_config();
  std::int64_t rows = -1;
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{1} << 40}) {
    config.struct_size = size;
    EXPECT_EQ(xd_ep_recv_bound(&config, &rows), XD_ERROR_INVALID_ARGUMENT) << size;
    expect_words(xd_last_error(), {"struct_size"});
  }
  EXPECT_EQ(xd_ep_recv_bound(nullptr, &rows), XD_ERROR_INVALID_ARGUMENT);
}

TEST(Abi, ASizeThatCutsAFieldIsRefused) {
  xd_ep_config config = small_config();
  std::int64_t rows = -1;
  xd_ep_memory memory = XD_EP_MEMORY_INIT;
  for (std::size_t cut = 1; cut < sizeof(void*); ++cut) {
    config.struct_size = offsetof(xd_ep_config, expert_ranks) + cut;
    EXPECT_EQ(xd_ep_recv_bound(&config, &rows), XD_ERROR_INVALID_ARGUMENT) << cut;
    expect_words(xd_last_error(), {"struct_size"});
    memory.struct_size = offsetof(xd_ep_memory, staging_bytes) + cut;
    config.struct_size = sizeof(config);
    EXPECT_EQ(xd_ep_group_memory(&config, &memory), XD_ERROR_INVALID_ARGUMENT) << cut;
    expect_words(xd_last_error(), {"struct_size"});
  }
  EXPECT_EQ(rows, -1);
  EXPECT_EQ(memory.staging_bytes, 0u);
}

TEST(Abi, OutputsAreWrittenNoFurtherThanTheCallersVersionGoes) {
  const xd_ep_config config = small_config();
  xd_ep_memory memory = XD_EP_MEMORY_INIT;
  memory.struct_size = offsetof(xd_ep_memory, private_bytes);
  memory.private_bytes = 0x5A5A5A5A;
  ok(xd_ep_group_memory(&config, &memory));
  EXPECT_GT(memory.symmetric_bytes, 0u);
  EXPECT_EQ(memory.private_bytes, 0x5A5A5A5Au);
  EXPECT_EQ(memory.struct_size, offsetof(xd_ep_memory, private_bytes));
}

TEST(Abi, OutputsLeaveTheFieldsOfNewerCallersAlone) {
  const xd_ep_config config = small_config();
  struct Newer {
    xd_ep_memory known;
    std::uint64_t unknown;
  };
  Newer memory{XD_EP_MEMORY_INIT, 0};
  memory.known.struct_size = sizeof(Newer);
  ok(xd_ep_group_memory(&config, &memory.known));
  EXPECT_GT(memory.known.symmetric_bytes, 0u);
  EXPECT_EQ(memory.unknown, 0u);
}

// Handles of ranks are made through structs too: one rank is enough to see that their versions are
// read in the same way.
TEST(Abi, CommunicatorsAndOperationsReadOlderCallersStructs) {
  xd_unique_id id;
  xd_unique_id_config id_config = XD_UNIQUE_ID_CONFIG_INIT;
  id_config.struct_size = offsetof(xd_unique_id_config, address);
  ok(xd_unique_id_create(&id_config, &id));
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.struct_size = offsetof(xd_comm_config, heap_bytes);
  config.num_ranks = 1;
  config.unique_id = &id;
  config.heap_bytes = ~std::size_t{0};  // past the older caller's end: must not be read
  const Comm comm = make_comm(config);
  const xd_ep_config ep_config = small_config();
  const Group group = make_group(comm.get(), ep_config);
  std::size_t plan_bytes = 0;
  ok(xd_ep_plan_size(&ep_config, &plan_bytes));
  alignas(16) std::byte plan[4096];
  ASSERT_LE(plan_bytes, sizeof(plan));
  std::int64_t shape[2] = {0, 1};
  DLTensor topk_idx{};
  topk_idx.device = {kDLCPU, 0};
  topk_idx.ndim = 2;
  topk_idx.dtype = {kDLInt, 32, 1};
  topk_idx.shape = shape;
  xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
  args.struct_size = offsetof(xd_ep_prepare_args, counts);
  args.topk_idx = &topk_idx;
  args.plan = plan;
  args.plan_bytes = plan_bytes;
  DLTensor nonsense{};
  args.counts = &nonsense;  // past the older caller's end: must not be read
  EXPECT_EQ(xd_ep_prepare(group.get(), &args, nullptr), XD_SUCCESS) << xd_last_error();
}

TEST(TensorHeader, MakesTensorsThatMayBeCopiedBeforeTheyAreUsed) {
  float data[12] = {};
  const DLDevice device{kDLCPU, 0};
  xd_tensor rows = xd_tensor_2d(data, XD_DTYPE_FLOAT32, device, 3, 4);
  xd_tensor copy = rows;
  const DLTensor* seen = xd_tensor_view(&copy);
  EXPECT_EQ(xd_tensor_view(&rows)->shape, rows.shape);
  EXPECT_EQ(seen->shape, copy.shape);
  EXPECT_EQ(seen->data, data);
  EXPECT_EQ(seen->ndim, 2);
  EXPECT_EQ(seen->shape[0], 3);
  EXPECT_EQ(seen->shape[1], 4);
  EXPECT_EQ(seen->strides[0], 4);
  EXPECT_EQ(seen->strides[1], 1);
  EXPECT_EQ(seen->byte_offset, 0u);
  xd_tensor columns = xd_tensor_2d_strided(data, XD_DTYPE_FLOAT32, device, 3, 4, 1, 3);
  EXPECT_EQ(xd_tensor_view(&columns)->strides[1], 3);
  xd_tensor vector = xd_tensor_1d(data, XD_DTYPE_FLOAT8_E8M0FNU, device, 12);
  seen = xd_tensor_view(&vector);
  EXPECT_EQ(seen->ndim, 1);
  EXPECT_EQ(seen->shape[0], 12);
  EXPECT_EQ(seen->strides[0], 1);
  EXPECT_EQ(seen->dtype.code, 14);
  EXPECT_EQ(seen->dtype.bits, 8);
  EXPECT_EQ(seen->dtype.lanes, 1);
}

}  // namespace
}  // namespace xd::test
