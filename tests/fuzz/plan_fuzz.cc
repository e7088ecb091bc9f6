// Plans from strangers: any bytes may be refused or give wrong values, but never cause an access
// outside the tensors or harm to the group. Run it also under AddressSanitizer.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "conformance/batch.h"
#include "conformance/slots/batch.h"
#include "faults/meeting.h"
#include "fuzz/seeds.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

constexpr xd_ep_operation kUsers[] = {XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_COMBINE_BWD,
                                      XD_EP_DISPATCH_BWD};

[[noreturn]] void crash(const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, xd_last_error());
  std::abort();  // the fuzzer records an abort as a finding
}

Comm comm_of_one() {
  const xd_unique_id id = new_id();
  xd_comm_config config = id_config(id, 0, 1);
  config.heap_bytes = std::size_t{1} << 20;
  return make_comm(config);
}

bool is_one_of(xd_status status, std::initializer_list<xd_status> good) {
  return std::ranges::find(good, status) != good.end();
}

// A group with valid arguments for every operation, and the good plan.
class Victim {
 public:
  virtual ~Victim() = default;
  // Calls every operation with other bytes as the plan, then one with the good plan again.
  virtual void use(const Buffer& plan) = 0;
  const std::vector<std::byte>& good() const { return good_; }

 protected:
  std::vector<std::byte> good_;
};

class RowsVictim final : public Victim {
 public:
  RowsVictim(const Rank& rank, xd_ep_layout layout, Place place)
      : case_(case_of(layout)),
        group_(make_group(rank.comm, case_.config(0))),
        batch_(rank, case_, 0, place) {
    batch_.prepare(group_.get());
    good_ = batch_.plan().read();
  }
  void use(const Buffer& plan) override {
    batch_.use_plan(plan.data(), plan.bytes());
    for (const xd_ep_operation operation : kUsers) {
      const xd_status status = batch_.call(group_.get(), operation).status;
      if (!is_one_of(status, {XD_SUCCESS, XD_ERROR_INVALID_ARGUMENT, XD_ERROR_OVERFLOW})) {
        crash("operation");
      }
    }
    if (!batch_.guards_intact()) crash("write outside a tensor");
    batch_.use_plan(batch_.plan().data(), batch_.plan().bytes());
    if (batch_.call(group_.get(), XD_EP_DISPATCH) != XD_SUCCESS) crash("good plan");
  }

 private:
  static Case case_of(xd_ep_layout layout) {
    Case c = plain_case(1);
    c.layout = layout;
    return c;
  }

  const Case case_;
  const Group group_;
  Batch batch_;
};

// Low latency. In halves, the sums of this rank's own tokens go where the plan's items say.
class SlotsVictim final : public Victim {
 public:
  explicit SlotsVictim(const Rank& rank)
      : case_(plain_ll_case(1)), group_(make_group(rank, case_)), batch_(rank, case_, 0) {
    ok(batch_.call(group_.get(), XD_LL_DISPATCH));
    good_ = batch_.plan().read();
  }
  void use(const Buffer& plan) override {
    batch_.use_plan(plan);
    combine(XD_LL_PHASE_BOTH);
    if (combine(XD_LL_PHASE_SEND)) combine(XD_LL_PHASE_RECEIVE);
    batch_.use_plan(batch_.plan());
    if (!combine(XD_LL_PHASE_BOTH)) crash("good plan");
  }

 private:
  bool combine(xd_ll_phase phase) {
    const xd_status status = batch_.call(group_.get(), XD_LL_COMBINE, phase).status;
    if (!is_one_of(status, {XD_SUCCESS, XD_ERROR_INVALID_ARGUMENT})) crash("combine");
    return status == XD_SUCCESS;
  }

  const LlCase case_;
  const LlGroup group_;
  LlBatch batch_;
};

class OneRank {
 public:
  OneRank() : comm_(comm_of_one()), memory_(make_memory("cpu", 0)) {
    rank_ = {0, 1, true, comm_.get(), memory_.get(), "", {}};
    for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
      for (const Place place : {Place::ordinary, Place::symmetric}) {
        victims_.push_back(std::make_unique<RowsVictim>(rank_, layout, place));
      }
    }
    victims_.push_back(std::make_unique<SlotsVictim>(rank_));
  }

  // The bytes as a plan; then as the end of a good one, where no checksum stands before them.
  void try_bytes(const std::vector<std::byte>& bytes) {
    for (const std::unique_ptr<Victim>& victim : victims_) {
      use(*victim, bytes);
      std::vector<std::byte> damaged = victim->good();
      const std::size_t tail = std::min(bytes.size(), damaged.size());
      std::copy_n(bytes.begin(), tail, damaged.end() - static_cast<std::ptrdiff_t>(tail));
      use(*victim, damaged);
    }
  }

  std::vector<std::vector<std::byte>> good_plans() const {
    std::vector<std::vector<std::byte>> plans;
    for (const std::unique_ptr<Victim>& victim : victims_) plans.push_back(victim->good());
    return plans;
  }

 private:
  void use(Victim& victim, const std::vector<std::byte>& bytes) {
    Buffer plan(rank_, bytes.size(), Place::ordinary);
    plan.write(bytes);
    xd_ep_plan_info info = XD_EP_PLAN_INFO_INIT;
    const xd_status status = xd_ep_plan_get_info(plan.data(), plan.bytes(), &info);
    xd_ll_plan_info ll_info = XD_LL_PLAN_INFO_INIT;
    const xd_status ll_status = xd_ll_plan_get_info(plan.data(), plan.bytes(), &ll_info);
    if (!is_one_of(status, {XD_SUCCESS, XD_ERROR_INVALID_ARGUMENT}) ||
        !is_one_of(ll_status, {XD_SUCCESS, XD_ERROR_INVALID_ARGUMENT})) {
      crash("plan_get_info");
    }
    victim.use(plan);
    if (!plan.guards_intact()) crash("write beside the plan");
  }

  Comm comm_;
  std::unique_ptr<Memory> memory_;
  Rank rank_{};
  std::vector<std::unique_ptr<Victim>> victims_;
};

OneRank& one_rank() {
  static OneRank rank;
  return rank;
}

}  // namespace
}  // namespace xd::test

namespace xd::fuzz {

std::vector<std::vector<std::byte>> seeds() { return test::one_rank().good_plans(); }

}  // namespace xd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  xd::test::one_rank().try_bytes(std::vector<std::byte>(bytes, bytes + size));
  return 0;
}
