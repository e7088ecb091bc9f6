#include "faults/wait_family.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

#include "conformance/batch.h"
#include "faults/gemm_call.h"
#include "faults/ll/step.h"
#include "faults/rank_program.h"

namespace xd::test {
namespace {

constexpr const char* kBulkNames[] = {"prepare", "dispatch", "combine", "dispatch_bwd",
                                      "combine_bwd"};

class BulkWaiter final : public Waiter {
 public:
  // The operation of the test is the last of so many parts.
  BulkWaiter(const Rank& rank, xd_ep_operation operation, int parts = 1)
      : BulkWaiter(rank, operation,
                   make_group(rank.comm, plain_case(rank.num_ranks).config(rank.rank))) {
    batch_->prepare_args.parts = parts;
    batch_->prepare(group_);
    epoch_ = static_cast<std::uint64_t>(parts) + 1;
    for (int part = 1; parts > 1 && part <= parts; ++part) {
      batch_->dispatch_args.part = batch_->combine_args.part = part;
      if (part < parts) ok(batch_->call(group_, operation_));
    }
  }
  CallEnd call() override {
    Outcome end = batch_->call(group_, operation_);
    return {end.status, std::move(end.text)};
  }
  std::uint64_t epoch() const override { return epoch_; }
  std::unique_ptr<Waiter> beside(Memory& memory) override {
    auto other = std::unique_ptr<BulkWaiter>(new BulkWaiter(rank_.on(memory), operation_, Group()));
    other->group_ = group_;
    other->batch_->use_plan(batch_->plan().data(), batch_->plan().bytes());
    return other;
  }
  void expect_finished(xd_status status) override {
    for (int operation = 0; operation < std::ssize(kBulkNames); ++operation) {
      EXPECT_EQ(batch_->call(group_, static_cast<xd_ep_operation>(operation)), status);
    }
    const xd_ep_config config = case_.config(rank_.rank);
    xd_ep_group* another = nullptr;
    EXPECT_EQ(xd_ep_group_create(rank_.comm, &config, &another), status) << xd_last_error();
    EXPECT_EQ(another, nullptr);
  }
  void free_arguments() override { batch_.reset(); }

 private:
  BulkWaiter(const Rank& rank, xd_ep_operation operation, Group group)
      : rank_(rank),
        operation_(operation),
        case_(plain_case(rank.num_ranks)),
        own_(std::move(group)),
        group_(own_.get()),
        batch_(std::in_place, rank_, case_) {}

  const Rank rank_;
  const xd_ep_operation operation_;
  std::uint64_t epoch_ = 2;
  const Case case_;
  const Group own_;
  xd_ep_group* group_;
  std::optional<Batch> batch_;
};

class LowLatencyWaiter final : public Waiter {
 public:
  LowLatencyWaiter(const Rank& rank, xd_ll_operation operation, bool halves)
      : seat_(rank, echo_case(rank.num_ranks)),
        operation_(operation),
        halves_(halves),
        step_(std::in_place, seat_.rank, seat_.c, 1) {
    seat_.good_steps(nobody(rank.num_ranks), 0, 1);
    if (operation_ == XD_LL_COMBINE) ok(seat_.dispatch(*step_));
  }
  CallEnd call() override {
    if (!halves_) return call_whole();
    ok(seat_.call(*step_, operation_, XD_LL_PHASE_SEND));
    return told(seat_.call(*step_, operation_, XD_LL_PHASE_RECEIVE));
  }
  CallEnd call_whole() override { return told(seat_.call(*step_, operation_)); }
  std::unique_ptr<Waiter> beside(Memory&) override { return nullptr; }  // several may be in flight
  void expect_finished(xd_status status) override {
    for (const xd_ll_operation kind : {XD_LL_DISPATCH, XD_LL_COMBINE}) {
      for (const xd_ll_phase phase : {XD_LL_PHASE_BOTH, XD_LL_PHASE_SEND, XD_LL_PHASE_RECEIVE}) {
        EXPECT_EQ(step_->call(seat_.group.get(), kind, phase), status) << xd_last_error();
      }
    }
  }
  void free_arguments() override { step_.reset(); }

 private:
  static CallEnd told(LlOutcome end) { return {end.status, std::move(end.text)}; }

  const LlSeat seat_;
  const xd_ll_operation operation_;
  const bool halves_;
  std::optional<Echo> step_;
};

class ProductWaiter final : public Waiter {
 public:
  ProductWaiter(const Rank& rank, xd_gemm_operation operation)
      : ProductWaiter(rank, operation, make_context(rank.comm, gemm_fault_config(rank.num_ranks))) {
    ok(call_->call(context_));
    call_->check(context_);
  }
  CallEnd call() override {
    GemmOutcome end = call_->call(context_);
    return {end.status, std::move(end.text)};
  }
  std::unique_ptr<Waiter> beside(Memory& memory) override {
    auto other = std::unique_ptr<ProductWaiter>(
        new ProductWaiter(rank_.on(memory), operation_, GemmContext()));
    other->context_ = context_;
    return other;
  }
  void expect_finished(xd_status status) override {
    for (const xd_gemm_operation operation : kGemmOperations) {
      EXPECT_EQ(GemmCall(rank_, operation).call(context_), status) << name_of(operation);
    }
    EXPECT_EQ(xd_gemm_join_failed(context_, XD_GEMM_ALL_GATHER, "late", rank_.stream()), status);
    const xd_gemm_config config = gemm_fault_config(rank_.num_ranks);
    xd_gemm_context* another = nullptr;
    EXPECT_EQ(xd_gemm_context_create(rank_.comm, &config, &another), status) << xd_last_error();
    EXPECT_EQ(another, nullptr);
  }
  void free_arguments() override { call_.reset(); }

 private:
  ProductWaiter(const Rank& rank, xd_gemm_operation operation, GemmContext context)
      : rank_(rank),
        operation_(operation),
        own_(std::move(context)),
        context_(own_.get()),
        call_(std::in_place, rank_, operation) {}

  const Rank rank_;
  const xd_gemm_operation operation_;
  const GemmContext own_;
  xd_gemm_context* context_;
  std::optional<GemmCall> call_;
};

}  // namespace

void PrintTo(const CallEnd& end, std::ostream* out) {
  *out << xd_status_name(end.status) << " " << end.text;
}
void PrintTo(const Waiting& waiting, std::ostream* out) { *out << waiting.name; }

std::vector<Waiting> bulk_waits() {
  std::vector<Waiting> all;
  for (int i = 0; i < std::ssize(kBulkNames); ++i) {
    const auto operation = static_cast<xd_ep_operation>(i);
    all.push_back({kBulkNames[i], i, kBulkNames[i], true, [operation](const Rank& rank) {
                     return std::make_unique<BulkWaiter>(rank, operation);
                   }});
  }
  return all;
}

std::vector<Waiting> part_waits() {
  std::vector<Waiting> all;
  for (const xd_ep_operation operation : {XD_EP_DISPATCH, XD_EP_COMBINE}) {
    const std::string name = kBulkNames[operation];
    all.push_back({"part_of_" + name, operation, name, true, [operation](const Rank& rank) {
                     return std::make_unique<BulkWaiter>(rank, operation, 2);
                   }});
  }
  return all;
}

std::vector<Waiting> low_latency_waits() {
  std::vector<Waiting> all;
  for (const xd_ll_operation operation : {XD_LL_DISPATCH, XD_LL_COMBINE}) {
    for (const bool halves : {false, true}) {
      const std::string name = operation == XD_LL_DISPATCH ? "dispatch" : "combine";
      all.push_back({halves ? "receive_of_" + name : name, operation, "ll_" + name, false,
                     [operation, halves](const Rank& rank) {
                       return std::make_unique<LowLatencyWaiter>(rank, operation, halves);
                     }});
    }
  }
  return all;
}

std::vector<Waiting> product_waits() {
  std::vector<Waiting> all;
  for (const xd_gemm_operation operation : kGemmOperations) {
    all.push_back(
        {name_of(operation), operation, name_of(operation), true, [operation](const Rank& rank) {
           return std::make_unique<ProductWaiter>(rank, operation);
         }});
  }
  return all;
}

}  // namespace xd::test
