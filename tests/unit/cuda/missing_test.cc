// A rank that does not find what others find: its table of symmetric memory is changed under an
// operation, as when memory is deregistered while a captured graph that uses it is replayed. Every
// rank's host does that at a moment of its own; here, at the worst one. Ranks are threads that
// share device 0.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "comm/feature.h"
#include "cuda/device.h"
#include "cuda/error.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "ep/bulk/group.h"
#include "ep/executors.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

constexpr int kRanks = 2, kTokens = 300, kTopk = 2, kHidden = 256, kExperts = 4;
constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr DLDataType kBf16{kDLBfloat, 16, 1}, kF32{kDLFloat, 32, 1}, kI32{kDLInt, 32, 1};

// Tensors cut from one piece of device memory.
class Cutter {
 public:
  explicit Cutter(std::byte* base) : base_(base) {}

  const DLTensor* cut(DLDataType type, std::vector<std::int64_t> shape) {
    Cut& cut = *cuts_.emplace_back(std::make_unique<Cut>());
    cut.shape = std::move(shape);
    std::size_t bytes = type.bits / 8u;
    for (const std::int64_t extent : cut.shape) bytes *= at(extent);
    cut.tensor = {.data = base_ + used_,
                  .device = {kDLCUDA, 0},
                  .ndim = static_cast<int>(cut.shape.size()),
                  .dtype = type,
                  .shape = cut.shape.data(),
                  .strides = nullptr,
                  .byte_offset = 0};
    used_ += round_up(bytes, 256);
    return &cut.tensor;
  }
  std::size_t used() const { return used_; }

 private:
  struct Cut {
    std::vector<std::int64_t> shape;
    DLTensor tensor;
  };

  std::byte* base_;
  std::size_t used_ = 0;
  std::vector<std::unique_ptr<Cut>> cuts_;
};

// One rank with a group and all tensors of a step; those that peers touch lie in registered memory.
class Seat {
 public:
  Seat(std::shared_ptr<Comm> comm, xd_ep_layout layout)
      : comm_(std::move(comm)),
        stream_(0),
        own_(0, 16 * kMiB, "test"),
        lent_(lend()),
        mine_(own_.data()),
        shared_(lent_) {
    comm_->memory().enlist(lent_, 16 * kMiB, &number_);
    xd_ep_config config = XD_EP_CONFIG_INIT;
    config.num_ranks = kRanks;
    config.num_experts = kExperts;
    config.max_topk = kTopk;
    config.max_tokens_per_rank = kTokens;
    config.hidden = kHidden;
    config.dtype = kBf16;
    config.layout = layout;
    config.staging = XD_EP_STAGING_NONE;
    group_ = ep::cuda::kBulk.make_group(comm_, &config);
    make_arguments(layout == XD_EP_EXPERT_MAJOR);
  }

  // The operation's end, as the group tells it.
  xd_ep_status run(xd_ep_operation operation) {
    enqueue(operation);
    stream_.synchronize();
    return group_->take_status();
  }

  std::vector<unsigned char> received() const {
    const cuda::DeviceGuard guard(0);
    std::vector<unsigned char> bytes(shared_.used());
    XD_CUDA_CHECK(
        cudaMemcpyAsync(bytes.data(), lent_, bytes.size(), cudaMemcpyDeviceToHost, stream_.get()));
    stream_.synchronize();
    return bytes;
  }

  // The entries of this rank's table for the registration, of all ranks.
  using Entry = std::array<HeapRange, kRanks>;
  Entry entry() const { return copy(Entry{}, false); }
  void set_entry(const Entry& value) const { copy(value, true); }

 private:
  static std::byte* lend() {
    const cuda::DeviceGuard guard(0);
    void* memory = nullptr;
    XD_CUDA_CHECK(cudaMalloc(&memory, 16 * kMiB));  // goes with the process
    return static_cast<std::byte*>(memory);
  }

  Entry copy(Entry entry, bool in) const {
    const cuda::DeviceGuard guard(0);
    auto* there = const_cast<HeapRange*>(
        comm_->device_comm().heap + heap_entry(static_cast<std::uint64_t>(number_), 0, kRanks));
    XD_CUDA_CHECK(in ? cudaMemcpyAsync(there, entry.data(), sizeof(entry), cudaMemcpyHostToDevice,
                                       stream_.get())
                     : cudaMemcpyAsync(entry.data(), there, sizeof(entry), cudaMemcpyDeviceToHost,
                                       stream_.get()));
    stream_.synchronize();
    return entry;
  }

  void write(const DLTensor* to, const void* from, std::size_t bytes) const {
    own_.write(static_cast<std::size_t>(static_cast<std::byte*>(to->data) - own_.data()), from,
               bytes);
  }

  void make_arguments(bool by_expert) {
    const std::int64_t rows = group_->config().capacity;
    const auto value_shape =
        by_expert ? std::vector<std::int64_t>{rows} : std::vector<std::int64_t>{rows, kTopk};
    std::vector<std::int32_t> ids;
    for (int t = 0; t < kTokens; ++t) {
      ids.push_back(t % kExperts);
      ids.push_back((t + 1) % kExperts);
    }
    const DLTensor* topk_idx = mine_.cut(kI32, {kTokens, kTopk});
    write(topk_idx, ids.data(), ids.size() * sizeof(ids[0]));
    const DLTensor* tokens = mine_.cut(kBf16, {kTokens, kHidden});
    const std::vector<std::uint16_t> ones(at(kTokens) * kHidden, 0x3F80);
    write(tokens, ones.data(), ones.size() * sizeof(ones[0]));
    const DLTensor* topk_weights = mine_.cut(kF32, {kTokens, kTopk});
    const std::size_t plan_bytes = ep::plan_size(group_->config());
    void* plan = mine_.cut(kI32, {static_cast<std::int64_t>(plan_bytes / 4 + 1)})->data;
    const DLTensor* rows_here = shared_.cut(kBf16, {rows, kHidden});
    const DLTensor* values_here = shared_.cut(kF32, value_shape);

    prepare_.topk_idx = topk_idx;
    dispatch_.tokens = tokens;
    dispatch_.topk_weights = topk_weights;
    dispatch_.recv_tokens = rows_here;
    dispatch_.recv_weights = values_here;
    combine_.expert_out = rows_here;
    combine_.out = mine_.cut(kBf16, {kTokens, kHidden});
    combine_bwd_.grad_out = tokens;
    combine_bwd_.grad_expert_out = rows_here;
    dispatch_bwd_.grad_recv_tokens = rows_here;
    dispatch_bwd_.grad_recv_weights = values_here;
    dispatch_bwd_.grad_tokens = mine_.cut(kBf16, {kTokens, kHidden});
    dispatch_bwd_.grad_topk_weights = mine_.cut(kF32, {kTokens, kTopk});
    prepare_.plan = plan;
    prepare_.plan_bytes = plan_bytes;
    dispatch_.plan = combine_.plan = combine_bwd_.plan = dispatch_bwd_.plan = plan;
    dispatch_.plan_bytes = combine_.plan_bytes = plan_bytes;
    combine_bwd_.plan_bytes = dispatch_bwd_.plan_bytes = plan_bytes;
    XD_CHECK(mine_.used() <= 16 * kMiB && shared_.used() <= 16 * kMiB);
  }

  void enqueue(xd_ep_operation operation) {
    switch (operation) {
      case XD_EP_PREPARE:
        return group_->prepare(&prepare_, stream_.get());
      case XD_EP_DISPATCH:
        return group_->dispatch(&dispatch_, stream_.get());
      case XD_EP_COMBINE:
        return group_->combine(&combine_, stream_.get());
      case XD_EP_DISPATCH_BWD:
        return group_->dispatch_bwd(&dispatch_bwd_, stream_.get());
      case XD_EP_COMBINE_BWD:
        return group_->combine_bwd(&combine_bwd_, stream_.get());
      default:  // of other layouts
        FAIL() << "operation " << operation;
    }
  }

  std::shared_ptr<Comm> comm_;
  cuda::Stream stream_;
  cuda::DeviceBuffer own_;
  std::byte* lent_;
  Cutter mine_, shared_;
  int number_ = -1;
  std::unique_ptr<ep::Group> group_;
  xd_ep_prepare_args prepare_ = XD_EP_PREPARE_ARGS_INIT;
  xd_ep_dispatch_args dispatch_ = XD_EP_DISPATCH_ARGS_INIT;
  xd_ep_combine_args combine_ = XD_EP_COMBINE_ARGS_INIT;
  xd_ep_dispatch_bwd_args dispatch_bwd_ = XD_EP_DISPATCH_BWD_ARGS_INIT;
  xd_ep_combine_bwd_args combine_bwd_ = XD_EP_COMBINE_BWD_ARGS_INIT;
};

// EXPERT_MAJOR combines send sums and read no peer's rows.
struct Missing {
  xd_ep_layout layout;
  xd_ep_operation operation;
};

class MissingRegistration : public testing::TestWithParam<Missing> {
 protected:
  void SetUp() override {
    const Feature cuda = feature(XD_FEATURE_CUDA);
    if (!cuda.available) GTEST_SKIP() << cuda.reason;
  }
};

TEST_P(MissingRegistration, OnOneRankIsAMismatchOnAllAndNobodyWaits) {
  const auto [layout, operation] = GetParam();
  const xd_unique_id id = new_id();
  expect_no_errors(on_threads(kRanks, [&](int rank) {
    xd_comm_config config = id_config(id, rank, kRanks);
    config.device = {kDLCUDA, 0};
    config.timeout_ms = 5000;
    const std::shared_ptr<Comm> comm = Comm::create(config);
    Seat seat(comm, layout);
    ASSERT_EQ(seat.run(XD_EP_PREPARE).status, XD_SUCCESS);
    ASSERT_EQ(seat.run(XD_EP_DISPATCH).status, XD_SUCCESS);
    ASSERT_EQ(seat.run(operation).status, XD_SUCCESS);
    const auto received = seat.received();
    const Seat::Entry entry = seat.entry();
    for (int round = 0; round < 4; ++round) {
      const int finder = round % kRanks;
      if (rank == finder) seat.set_entry({});
      comm->collective().barrier();
      const xd_ep_status status = seat.run(operation);
      EXPECT_EQ(status.status, XD_ERROR_MISMATCH) << status.text;
      EXPECT_EQ(status.rank, finder);
      expect_words(status.text, {"rank " + std::to_string(finder) + " does not find"});
      ASSERT_EQ(comm->errors().fatal_error(), nullptr)
          << comm->errors().text_of(*comm->errors().fatal_error());
      comm->collective().barrier();
      seat.set_entry(entry);
      comm->collective().barrier();
      EXPECT_EQ(seat.run(operation).status, XD_SUCCESS) << "the group goes on";
      EXPECT_EQ(seat.received(), received);
      comm->collective().barrier();
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Operations, MissingRegistration,
                         testing::Values(Missing{XD_EP_EXPERT_MAJOR, XD_EP_DISPATCH},
                                         Missing{XD_EP_EXPERT_MAJOR, XD_EP_COMBINE_BWD},
                                         Missing{XD_EP_EXPERT_MAJOR, XD_EP_DISPATCH_BWD},
                                         Missing{XD_EP_RANK_MAJOR, XD_EP_DISPATCH},
                                         Missing{XD_EP_RANK_MAJOR, XD_EP_COMBINE},
                                         Missing{XD_EP_RANK_MAJOR, XD_EP_COMBINE_BWD},
                                         Missing{XD_EP_RANK_MAJOR, XD_EP_DISPATCH_BWD}));

}  // namespace
}  // namespace xd::test
