// Pointers that a device could not follow: a bad argument of one rank, not the end of its context.
#include <gtest/gtest.h>

#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "conformance/batch.h"
#include "conformance/cuda/graph.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr xd_ep_operation kOperations[] = {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE,
                                           XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD};

// Memory that is not the rank's device's, but looks like any other pointer.
struct Foreign {
  std::string name;
  void* ptr;
  bool pinned;  // true for outputs of prepare, which may be pinned
};

class ForeignMemory {
 public:
  static constexpr std::size_t kBytes = std::size_t{1} << 20;

  explicit ForeignMemory(const Rank& rank)
      : pageable_(new (std::align_val_t{256}) std::byte[kBytes]) {
    const int device = rank.memory->device().device_id;
    cuda_ok(cudaHostAlloc(&pinned_, kBytes, cudaHostAllocPortable), "cudaHostAlloc");
    all_ = {{"pageable", pageable_, false}, {"pinned", pinned_, true}};
    if (device_count("cuda") == 1) return;
    cuda_ok(cudaSetDevice((device + 1) % device_count("cuda")), "cudaSetDevice");
    cuda_ok(cudaMalloc(&elsewhere_, kBytes), "cudaMalloc");
    cuda_ok(cudaSetDevice(device), "cudaSetDevice");
    all_.push_back({"of another device", elsewhere_, false});
  }
  // CUDA's memory goes with the process: freeing it would wait for kernels of other ranks.
  ~ForeignMemory() { ::operator delete[](pageable_, std::align_val_t{256}); }
  ForeignMemory(const ForeignMemory&) = delete;
  ForeignMemory& operator=(const ForeignMemory&) = delete;

  const std::vector<Foreign>& all() const { return all_; }

 private:
  std::byte* pageable_;
  void* pinned_ = nullptr;
  void* elsewhere_ = nullptr;
  std::vector<Foreign> all_;
};

class ForeignPointer : public testing::TestWithParam<xd_ep_layout> {};

// The highest rank makes the mistake.
void expect_refused(const Rank& rank, xd_ep_group* group, Batch& batch, xd_ep_operation operation,
                    const std::string& named) {
  const Outcome outcome = batch.call(group, operation);
  if (rank.rank == rank.num_ranks - 1) {
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(outcome.mentions(named)) << outcome.text;
    EXPECT_TRUE(outcome.mentions("expected memory of CUDA device")) << outcome.text;
  } else {
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions("rank " + std::to_string(rank.num_ranks - 1))) << outcome.text;
  }
  EXPECT_TRUE(batch.untouched(operation)) << "an output was written";
}

// Runs `body` with another pointer in the place of the tensor's on the guilty rank.
template <class Body>
void with_pointer(const Rank& rank, const DLTensor** slot, void* ptr, Body&& body) {
  const DLTensor* const original = *slot;
  DLTensor damaged = *original;
  damaged.data = ptr;
  damaged.byte_offset = 0;
  if (rank.rank == rank.num_ranks - 1) *slot = &damaged;
  body();
  *slot = original;
}

TEST_P(ForeignPointer, IsRefusedByNameAndHarmsNothing) {
  Case c = plain_case(world().num_ranks());
  c.layout = GetParam();
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    // Also after a refused prepare, which leaves no plan behind.
    const auto make_plan = [&] {
      batch.prepare(group.get());
      batch.poison_outputs();
    };
    const ForeignMemory memory(rank);
    for (const Foreign& foreign : memory.all()) {
      for (Batch::Field& field : batch.fields()) {
        if (field.tensor->buffer().bytes() == 0) continue;  // no kernel touches it
        const bool number = field.operation == XD_EP_PREPARE && field.output;
        if (number && foreign.pinned) continue;  // the host may want to read these
        SCOPED_TRACE(foreign.name + " " + field.name);
        make_plan();
        with_pointer(rank, field.slot, foreign.ptr, [&] {
          expect_refused(rank, group.get(), batch, field.operation, field.name);
        });
      }
      const bool guilty = rank.rank == rank.num_ranks - 1;
      for (const xd_ep_operation operation : kOperations) {
        SCOPED_TRACE(foreign.name + " plan of operation " + std::to_string(operation));
        make_plan();
        if (guilty) {
          batch.use_plan(foreign.ptr, batch.plan().bytes());
          batch.prepare_args.plan = foreign.ptr;
        }
        expect_refused(rank, group.get(), batch, operation, "plan");
        batch.use_plan(batch.plan().data(), batch.plan().bytes());
        batch.prepare_args.plan = batch.plan().data();
      }
    }
    for (const xd_ep_operation operation : kOperations) ok(batch.call(group.get(), operation));
    EXPECT_TRUE(batch.guards_intact());
  });
}

// A tensor may begin in the right place, and end where there is nothing.
TEST_P(ForeignPointer, AlsoAtTheEndOfATensorIsRefused) {
  Case c = plain_case(world().num_ranks());
  c.layout = GetParam();
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    batch.poison_outputs();
    Batch::Field& rows = batch.field(XD_EP_DISPATCH, "recv_tokens");
    const DLTensor* const original = *rows.slot;
    DLTensor longer = *original;
    std::int64_t shape[] = {INT32_MAX, original->shape[1]};
    longer.shape = shape;
    longer.strides = nullptr;
    if (rank.rank == rank.num_ranks - 1) *rows.slot = &longer;
    expect_refused(rank, group.get(), batch, XD_EP_DISPATCH, "recv_tokens: ends at");
    *rows.slot = original;
    ok(batch.call(group.get(), XD_EP_DISPATCH));
  });
}

// Rows that combine_bwd copies without weights have scales beside them.
TEST_P(ForeignPointer, OfScalesIsRefusedWhicheverWayTheyGo) {
  Case c = plain_case(world().num_ranks());
  c.layout = GetParam();
  c.cargo = Cargo::e4m3_with_floats;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    const xd_ep_dispatch_args& forward = batch.dispatch_args;
    xd_ep_combine_bwd_args& backward = batch.combine_bwd_args;
    backward.grad_out = forward.tokens;
    backward.grad_out_scales = forward.scales;
    backward.grad_expert_out = forward.recv_tokens;
    backward.grad_expert_out_scales = forward.recv_scales;
    backward.expert_out = backward.weights = backward.grad_weights = nullptr;
    const ForeignMemory memory(rank);
    for (const Foreign& foreign : memory.all()) {
      const auto expect = [&](xd_ep_operation operation, const char* name, const DLTensor** slot) {
        SCOPED_TRACE(foreign.name + " " + name);
        with_pointer(rank, slot, foreign.ptr,
                     [&] { expect_refused(rank, group.get(), batch, operation, name); });
      };
      expect(XD_EP_DISPATCH, "scales", &batch.dispatch_args.scales);
      expect(XD_EP_DISPATCH, "recv_scales", &batch.dispatch_args.recv_scales);
      expect(XD_EP_COMBINE_BWD, "grad_out_scales", &backward.grad_out_scales);
      expect(XD_EP_COMBINE_BWD, "grad_expert_out_scales", &backward.grad_expert_out_scales);
    }
    EXPECT_TRUE(batch.untouched(XD_EP_DISPATCH)) << "where combine_bwd would have written, too";
    ok(batch.call(group.get(), XD_EP_COMBINE_BWD));
    EXPECT_TRUE(batch.guards_intact());
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, ForeignPointer,
                         testing::Values(XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR));

// Numbers that the host wants to read.
TEST(PinnedOutputs, OfPrepareAreWritten) {
  Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    void* pinned = nullptr;
    cuda_ok(cudaHostAlloc(&pinned, 4096, cudaHostAllocPortable), "cudaHostAlloc");
    Batch::Field& counts = batch.field(XD_EP_PREPARE, "counts");
    const std::vector<std::byte> expected = [&] {
      batch.prepare(group.get());
      return counts.tensor->read();
    }();
    const DLTensor* const original = *counts.slot;
    DLTensor in_host = *original;
    in_host.data = pinned;
    in_host.byte_offset = 0;
    for (const DLDeviceType type : {kDLCUDAHost, kDLCUDA}) {
      in_host.device = {type, type == kDLCUDA ? rank.memory->device().device_id : 0};
      std::fill_n(static_cast<std::byte*>(pinned), expected.size(), kPoison);
      *counts.slot = &in_host;
      batch.prepare(group.get());
      const auto* got = static_cast<const std::byte*>(pinned);
      EXPECT_EQ(std::vector(got, got + expected.size()), expected);
    }
    *counts.slot = original;
  });
}

}  // namespace
}  // namespace xd::test
