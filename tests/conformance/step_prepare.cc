// Step: prepare, and what it says about the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>

#include "conformance/said.h"
#include "conformance/step.h"

namespace xd::test {
namespace {

struct CountOutput {
  const char* name;
  const DLTensor* xd_ep_prepare_args::*field;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> values;
};

std::vector<CountOutput> count_outputs(const Routed& routed, int rank) {
  const int ranks = routed.placement().num_ranks;
  const std::int64_t experts = routed.placement().local_experts_of(rank);
  const Received& received = routed.received(rank);
  std::vector<std::int64_t> rank_rows;
  for (int source = 0; source < ranks; ++source) {
    for (int destination = 0; destination < ranks; ++destination) {
      rank_rows.push_back(routed.rows_between(source, destination));
    }
  }
  return {
      {"counts", &xd_ep_prepare_args::counts, {experts}, received.counts},
      {"padded_counts", &xd_ep_prepare_args::padded_counts, {experts}, received.padded},
      {"offsets", &xd_ep_prepare_args::offsets, {experts + 1}, received.offsets},
      {"total", &xd_ep_prepare_args::total, {1}, {received.total}},
      {"rank_rows", &xd_ep_prepare_args::rank_rows, {ranks, ranks}, rank_rows},
  };
}

}  // namespace

void Step::set_table() {
  if (case_.tables == Tables::none) return;
  const Given table(case_.table(number_));
  ok(finish(rank_, group_, xd_ep_group_set_placement(group_, table.get(), rank_.stream())));
}

void Step::prepare() {
  const Choices mine = case_.ids(number_)[static_cast<std::size_t>(rank_.rank)];  // bad ids too
  Tensor topk_idx = token_input(
      case_.index_type, {tokens(), topk_},
      [&](std::int64_t t, std::int64_t k) {
        return static_cast<std::uint64_t>(mine.id(static_cast<int>(t), static_cast<int>(k)));
      },
      Grain::elements);
  xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
  args.topk_idx = topk_idx.dl();
  std::optional<Tensor> hint;
  if (case_.tables != Tables::none && case_.table(number_).hints) {
    hint.emplace(token_input(
        own_chance(33) % 2 == 0 ? kI32 : kI64, {tokens()},
        [&](std::int64_t t, std::int64_t) {
          return static_cast<std::uint64_t>(Table::hint_of(rank_.rank, static_cast<int>(t)));
        },
        Grain::elements));
    args.replica_hint = hint->dl();
  }
  set_plan(args, plan_);
  args.parts = case_.parts > 1 ? case_.parts : static_cast<std::int32_t>(common_chance(31) % 2);
  if (case_.alignments == PerPlan::own) args.alignment = routed_.placement().alignment;
  // In some batches each rank leaves out which outputs it likes.
  const std::uint64_t left_out = common_chance(2) % 4 == 0 ? own_chance(2) : 0;
  const std::vector<CountOutput> outputs = count_outputs(routed_, rank_.rank);
  std::vector<Tensor> tensors;
  tensors.reserve(outputs.size());  // args point into them
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    tensors.push_back(output(case_.output_type, outputs[i].shape, false, Grain::elements));
    if ((left_out >> i) % 2 == 0) args.*outputs[i].field = tensors[i].dl();
  }
  expect_status(XD_EP_PREPARE, xd_ep_prepare(group_, &args, rank_.stream()));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const std::vector<std::int64_t>& values = outputs[i].values;
    Image image(1, static_cast<std::int64_t>(values.size()), case_.output_type, kPoison);
    if ((left_out >> i) % 2 == 0) {
      image.set_row(0, [&](std::int64_t, std::int64_t column) {
        return static_cast<std::uint64_t>(values[static_cast<std::size_t>(column)]);
      });
    }
    expect_image(outputs[i].name, tensors[i], image);
  }
  EXPECT_TRUE(plan_.guards_intact()) << "bytes beside the plan were written";
  expect_plan_info();
  expect_row_experts();
}

// The zone of each row, also past the last one, even if the plan is refused.
void Step::expect_row_experts() {
  const std::int64_t rows = receive_rows(21);
  const DLDataType type = own_chance(22) % 2 == 0 ? kI32 : kI64;
  Tensor row_experts = output(type, {rows}, false, Grain::elements);
  xd_ep_plan_row_experts_args args = XD_EP_PLAN_ROW_EXPERTS_ARGS_INIT;
  set_plan(args, plan_);
  args.row_experts = row_experts.dl();
  const xd_status status = xd_ep_plan_row_experts(group_, &args, rank_.stream());
  if (case_.layout == XD_EP_RANK_MAJOR) {
    EXPECT_EQ(status, XD_ERROR_INVALID_ARGUMENT);
    expect_said("recv_topk_idx");
    EXPECT_TRUE(row_experts.untouched());
    return;
  }
  ok(status);
  rank_.memory->synchronize();
  const std::vector<std::int64_t>& offsets = received().offsets;
  Image image(rows, 1, type, kPoison);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t expert = -1;
    for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
      if (offsets[e] <= row && row < offsets[e + 1]) expert = static_cast<std::int64_t>(e);
    }
    image.set(row, 0, static_cast<std::uint64_t>(expert));
  }
  expect_image("row_experts", row_experts, image);
}

void Step::expect_plan_info() const {
  const std::vector<std::byte> plan = plan_.read();
  xd_ep_plan_info info = XD_EP_PLAN_INFO_INIT;
  ok(xd_ep_plan_get_info(plan.data(), plan.size(), &info));
  EXPECT_EQ(info.rank, rank_.rank);
  EXPECT_EQ(info.num_ranks, case_.num_ranks);
  EXPECT_EQ(info.num_experts, case_.num_experts());
  EXPECT_EQ(info.num_tokens, tokens());
  EXPECT_EQ(info.topk, topk_);
  EXPECT_EQ(info.layout, case_.layout);
  EXPECT_EQ(info.alignment, routed_.placement().alignment);
  EXPECT_EQ(info.recv_rows, std::min(received().total, capacity()));
  EXPECT_EQ(info.total_rows, received().total);
  EXPECT_EQ(info.capacity_rows, capacity());
  EXPECT_EQ(info.bad_ids, routed_.bad_ids());
  EXPECT_EQ(info.bad_id_rank, routed_.bad_id_rank());
  EXPECT_EQ(info.overflow_rank, routed_.overflow_rank());
  EXPECT_EQ(info.parts, case_.parts);
}

}  // namespace xd::test
