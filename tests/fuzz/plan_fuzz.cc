// Plans from strangers: any bytes may be refused or give wrong values, but never cause an access
// outside the tensors or harm to the group. Run it also under AddressSanitizer.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "conformance/batch.h"
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
  xd_unique_id id;
  ok(xd_unique_id_create(nullptr, &id));
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.unique_id = &id;
  config.num_ranks = 1;
  config.heap_bytes = std::size_t{1} << 20;
  return make_comm(config);
}

// A group with valid arguments for every operation, and the good plan.
struct Victim {
  Victim(const Rank& rank, xd_ep_layout layout, Place place)
      : c(case_of(layout)),
        group(make_group(rank.comm, c.config(0))),
        batch(std::make_unique<Batch>(rank, c, 0, place)) {
    batch->prepare(group.get());
    good = batch->plan().read();
  }
  static Case case_of(xd_ep_layout layout) {
    Case c = plain_case(1);
    c.layout = layout;
    return c;
  }

  Case c;
  Group group;
  std::unique_ptr<Batch> batch;
  std::vector<std::byte> good;
};

class OneRank {
 public:
  OneRank() : comm_(comm_of_one()), memory_(make_memory("cpu", 0)) {
    rank_ = {0, 1, true, comm_.get(), memory_.get(), ""};
    for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
      for (const Place place : {Place::ordinary, Place::symmetric}) {
        victims_.push_back(std::make_unique<Victim>(rank_, layout, place));
      }
    }
  }

  // The bytes as a plan; then as the end of a good one, where no checksum stands before them.
  void try_bytes(const std::vector<std::byte>& bytes) {
    for (const std::unique_ptr<Victim>& victim : victims_) {
      use(*victim, bytes);
      std::vector<std::byte> damaged = victim->good;
      const std::size_t tail = std::min(bytes.size(), damaged.size());
      std::copy_n(bytes.begin(), tail, damaged.end() - static_cast<std::ptrdiff_t>(tail));
      use(*victim, damaged);
    }
  }

  std::vector<std::vector<std::byte>> good_plans() const {
    std::vector<std::vector<std::byte>> plans;
    for (const std::unique_ptr<Victim>& victim : victims_) plans.push_back(victim->good);
    return plans;
  }

 private:
  void use(Victim& victim, const std::vector<std::byte>& bytes) {
    Buffer plan(rank_, bytes.size(), Place::ordinary);
    plan.write(bytes);
    xd_ep_plan_info info = XD_EP_PLAN_INFO_INIT;
    xd_status status = xd_ep_plan_get_info(plan.data(), plan.bytes(), &info);
    if (status != XD_SUCCESS && status != XD_ERROR_INVALID_ARGUMENT) crash("plan_get_info");
    victim.batch->use_plan(plan.data(), plan.bytes());
    for (const xd_ep_operation operation : kUsers) {
      status = victim.batch->call(victim.group.get(), operation).status;
      if (status != XD_SUCCESS && status != XD_ERROR_INVALID_ARGUMENT &&
          status != XD_ERROR_OVERFLOW) {
        crash("operation");
      }
    }
    if (!victim.batch->guards_intact() || !plan.guards_intact()) crash("write outside a tensor");
    victim.batch->use_plan(victim.batch->plan().data(), victim.batch->plan().bytes());
    if (victim.batch->call(victim.group.get(), XD_EP_DISPATCH) != XD_SUCCESS) crash("good plan");
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
