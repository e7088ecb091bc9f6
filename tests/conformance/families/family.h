// The three families of operations, for suites whose promises all of them make: such a suite is
// written once, as a TYPED_TEST over the adapters below. A promise of one family alone is a plain
// test beside it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "conformance/batch.h"
#include "conformance/families/damaged_tensor.h"
#include "conformance/gemm/batch.h"
#include "conformance/slots/batch.h"
#include "support/gtest_main.h"
#include "support/outcome.h"

namespace xd::test {

// How a call is made. Only low latency has halves.
enum class Way { whole, halves };

// Expert parallelism for many tokens.
struct Bulk {
  using Handle = Group;
  using Raw = xd_ep_group;
  using Config = xd_ep_config;
  using Operation = xd_ep_operation;
  using Status = xd_ep_status;
  static constexpr const char* kHandle = "group";  // the name of the parameter

  static xd_status create(xd_comm* comm, const Config* config, Raw** made) {
    return xd_ep_group_create(comm, config, made);
  }
  static xd_status join_failed(Raw* group, Operation operation, const char* why, xd_stream stream) {
    return xd_ep_join_failed(group, operation, why, stream);
  }
  static Status status(Raw* group) { return group_status(group); }
  static Status last_error() { return last_ep_error(); }
  static const volatile std::uint64_t* watch(Raw* group) {
    const volatile std::uint64_t* errors = nullptr;
    ok(xd_ep_group_watch(group, &errors));
    return errors;
  }
  // The functions that read nothing but a config; each with the text of its error.
  static std::vector<std::pair<xd_status, std::string>> read_config(const Config& config);
  static xd_ep_memory memory(const Config& config) {
    xd_ep_memory memory = XD_EP_MEMORY_INIT;
    ok(xd_ep_group_memory(&config, &memory));
    return memory;
  }

  using Case = test::Case;
  using Batch = test::Batch;
  static constexpr const char* kName = "Bulk";
  static constexpr Operation kOperations[] = {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE,
                                              XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD};
  static constexpr Way kWays[] = {Way::whole};

  static const char* name(Operation operation);
  static Case plain(Operation = XD_EP_PREPARE) { return plain_case(world().num_ranks()); }
  // Cases that together have every tensor.
  static std::vector<Case> full_cases();
  // A handle on which plain cases of all operations, and all that differs from them, may run.
  static Handle make_roomy(const Rank& rank);
  static Handle make(const Rank& rank, const Case& c) {
    return make_group(rank.comm, c.config(rank.rank));
  }
  static Config good_config(int rank) { return plain().config(rank); }

  // Calls that leave what others need, and whether one is such a call.
  static bool makes_plan(Operation operation) { return operation == XD_EP_PREPARE; }
  static void make_plan(Batch& batch, Raw* group);
  static xd_status enqueue(Batch& batch, Raw* group, Operation operation, Way = Way::whole) {
    return batch.enqueue(group, operation);
  }
  // Every argument of every call.
  static auto args(Batch& b) {
    return std::tie(b.prepare_args, b.dispatch_args, b.combine_args, b.combine_bwd_args,
                    b.dispatch_bwd_args);
  }
  static void expect_nothing_written(Batch& batch, Operation operation);
  // Whole batches with every element compared, in so many operations of the sequence of `first`.
  static void expect_works(const Rank& rank, const Case& c, Raw* group);
  static constexpr Operation kFirst = XD_EP_PREPARE;
  static constexpr std::uint64_t kOperationsOfWorks = 5;
  // Operations of one number are counted together, by operations and not by calls.
  static std::size_t sequence_of(Operation) { return 0; }
  static bool counts_operations(const Rank&) { return true; }

  // The damages that are refused in every tensor, and exceptions from them.
  static std::vector<Damage> damages();
  static bool takes(const Batch::Field& field, const Damage& damage);
  static bool may_be_missing(const Batch::Field& field);
};

// Expert parallelism for few tokens, at low latency.
struct LowLatency {
  using Handle = LlGroup;
  using Raw = xd_ll_group;
  using Config = xd_ll_config;
  using Operation = xd_ll_operation;
  using Status = xd_ll_status;
  static constexpr const char* kHandle = "group";  // the name of the parameter

  static xd_status create(xd_comm* comm, const Config* config, Raw** made) {
    return xd_ll_group_create(comm, config, made);
  }
  static xd_status join_failed(Raw* group, Operation operation, const char* why, xd_stream stream) {
    return xd_ll_join_failed(group, operation, why, stream);
  }
  static Status status(Raw* group) { return group_status(group); }
  static Status last_error() { return last_ll_error(); }
  static const volatile std::uint64_t* watch(Raw* group) {
    const volatile std::uint64_t* errors = nullptr;
    ok(xd_ll_group_watch(group, &errors));
    return errors;
  }
  // The functions that read nothing but a config; each with the text of its error.
  static std::vector<std::pair<xd_status, std::string>> read_config(const Config& config);
  static xd_ll_memory memory(const Config& config) {
    xd_ll_memory memory = XD_LL_MEMORY_INIT;
    ok(xd_ll_group_memory(&config, &memory));
    return memory;
  }

  using Case = LlCase;
  using Batch = LlBatch;
  static constexpr const char* kName = "LowLatency";
  static constexpr Operation kOperations[] = {XD_LL_DISPATCH, XD_LL_COMBINE};
  static constexpr Way kWays[] = {Way::whole, Way::halves};

  static Case plain(Operation = XD_LL_DISPATCH) { return plain_ll_case(world().num_ranks()); }
  static std::vector<Case> full_cases();
  static Handle make_roomy(const Rank& rank);
  static Handle make(const Rank& rank, const Case& c) { return make_group(rank, c); }
  static Config good_config(int) { return plain().config(plain().owners()); }  // in order: no list

  static bool makes_plan(Operation operation) { return operation == XD_LL_DISPATCH; }
  static void make_plan(Batch& batch, Raw* group);
  static xd_status enqueue(Batch& batch, Raw* group, Operation operation, Way way = Way::whole);
  static auto args(Batch& b) { return std::tie(b.dispatch_args, b.combine_args); }
  static void expect_nothing_written(Batch& batch, Operation operation);
  static void expect_works(const Rank& rank, const Case& c, Raw* group);
  static constexpr Operation kFirst = XD_LL_DISPATCH;
  static constexpr std::uint64_t kOperationsOfWorks = 1;
  static std::size_t sequence_of(Operation operation) { return makes_plan(operation) ? 0 : 1; }
  static bool counts_operations(const Rank& rank) { return !rank.asynchronous(); }

  static std::vector<Damage> damages();
  static bool takes(const Batch::Field& field, const Damage& damage);
  static bool may_be_missing(const Batch::Field& field);
};

// Products of matrices that are spread over ranks.
struct Products {
  using Handle = GemmContext;
  using Raw = xd_gemm_context;
  using Config = xd_gemm_config;
  using Operation = xd_gemm_operation;
  using Status = xd_gemm_status;
  using Case = GemmCase;
  using Batch = GemmBatch;
  static constexpr const char* kName = "Products";
  static constexpr const char* kHandle = "context";
  static constexpr Operation kOperations[] = {XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER,
                                              XD_GEMM_ALL_REDUCE};
  static constexpr Way kWays[] = {Way::whole};

  static xd_status create(xd_comm* comm, const Config* config, Raw** made) {
    return xd_gemm_context_create(comm, config, made);
  }
  static xd_status join_failed(Raw* context, Operation operation, const char* why,
                               xd_stream stream) {
    return xd_gemm_join_failed(context, operation, why, stream);
  }
  static Status status(Raw* context) { return context_status(context); }
  static Status last_error() { return last_gemm_error(); }
  static const volatile std::uint64_t* watch(Raw* context) {
    const volatile std::uint64_t* errors = nullptr;
    ok(xd_gemm_context_watch(context, &errors));
    return errors;
  }
  static std::vector<std::pair<xd_status, std::string>> read_config(const Config& config);
  static xd_gemm_memory memory(const Config& config) {
    xd_gemm_memory memory = XD_GEMM_MEMORY_INIT;
    ok(xd_gemm_context_memory(&config, &memory));
    return memory;
  }

  static const char* name(Operation operation) { return name_of(operation); }
  static Case plain(Operation operation = XD_GEMM_ALL_GATHER) {
    return plain_gemm_case(world().num_ranks(), operation);
  }
  static std::vector<Case> full_cases();
  static Handle make_roomy(const Rank& rank);
  static Handle make(const Rank& rank, const Case& c) {
    return make_context(rank.comm, c.config());
  }
  static Config good_config(int) { return plain().config(); }

  static bool makes_plan(Operation) { return false; }
  static void make_plan(Batch&, Raw*) {}
  static xd_status enqueue(Batch& batch, Raw* context, Operation, Way = Way::whole) {
    return batch.enqueue(context);
  }
  static auto args(Batch& b) { return std::tie(b.args); }
  // Outputs of a product that has failed may hold anything.
  static void expect_nothing_written(Batch& batch, Operation) {
    EXPECT_TRUE(batch.guards_intact());
  }
  static void expect_works(const Rank& rank, const Case& c, Raw* context);
  static constexpr Operation kFirst = XD_GEMM_ALL_GATHER;
  static constexpr std::uint64_t kOperationsOfWorks = 2;
  static std::size_t sequence_of(Operation) { return 0; }
  static bool counts_operations(const Rank&) { return true; }

  static std::vector<Damage> damages();
  static bool takes(const Batch::Field&, const Damage&) { return false; }
  static bool may_be_missing(const Batch::Field& field);
};

using Families = testing::Types<Bulk, LowLatency, Products>;

// GoogleTest's name of an instance, as in BadTensor/LowLatency.IsRefused.
struct FamilyName {
  template <class Family>
  static std::string GetName(int) {
    return Family::kName;
  }
};

}  // namespace xd::test
