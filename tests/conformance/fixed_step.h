// A training step on tensors that stay where they are while their content changes, routing
// included, so that a captured graph can replay it.
//
// The experts pass rows on: the step is dispatch, combine of the arrived rows, combine_bwd of the
// tokens, and dispatch_bwd of the rows that this gives. All numbers are small whole numbers, so
// that every result is exact.
#pragma once

#include <crossdock/ep.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "conformance/reference.h"
#include "conformance/tables.h"
#include "support/outcome.h"
#include "support/tensor.h"

namespace xd::test {

inline constexpr xd_ep_operation kStepOperations[] = {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE,
                                                      XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD};

struct FixedShape {
  xd_ep_layout layout = XD_EP_EXPERT_MAJOR;
  DLDataType dtype = kBf16;
  Place place = Place::ordinary;   // place of receive tensors
  std::int64_t recv_capacity = 0;  // 0 = no routing overflows
  int num_sms = 0;
  xd_ep_staging staging = XD_EP_STAGING_AUTO;
  int tokens = 48;
  int parts = 1;  // of plans
  // Of combine: one under which the sums are exact. Codes that are powers of two lose nothing of
  // tokens, which sums of RANK_MAJOR are made of.
  xd_ep_wire wire = XD_EP_WIRE_SAME;
  Tables tables = Tables::none;  // ids name logical experts, by the table that set_table() sets

  int hidden() const { return wire == XD_EP_WIRE_SAME ? 64 : 128; }
  xd_ep_config config(int num_ranks) const;
};

void PrintTo(const FixedShape& shape, std::ostream* out);  // for GoogleTest

inline constexpr FixedShape kFixedShapes[] = {{XD_EP_EXPERT_MAJOR, kBf16, Place::symmetric},
                                              {XD_EP_EXPERT_MAJOR, kF32, Place::ordinary},
                                              {XD_EP_RANK_MAJOR, kBf16, Place::ordinary},
                                              {XD_EP_RANK_MAJOR, kF16, Place::symmetric}};

class FixedStep {
 public:
  FixedStep(const Rank& rank, const FixedShape& shape);

  // Writes the inputs of another batch and poisons the outputs. With `spoiled` the last rank has
  // kSpoiledIds bad ids.
  void load(int number, bool spoiled = false);
  static constexpr int kSpoiledIds = 2;
  // Makes the group route by the loaded batch's table.
  void set_table(xd_ep_group* group) const;

  // `part`: 0 = the whole operation.
  xd_status enqueue(xd_ep_group* group, xd_ep_operation operation, int part = 0);
  // Operations of plans with parts are called part by part. Throws if a call fails.
  void enqueue_all(xd_ep_group* group);
  std::vector<Tensor*> receive_tensors();
  // The status with which a step of the loaded batch must end.
  xd_status expected() const;
  // Fails the test where an output is not what the loaded batch gives.
  void check() const;

 private:
  using Values = std::vector<float>;
  enum class Content : std::uint64_t { token, weight };

  float token_value(int rank, int token, std::int64_t column) const;
  float weight_value(int rank, int token, int k) const;
  float row_value(const Row& row, std::int64_t column, bool weighted) const;
  float square(int rank, int token) const;  // squared length of a token
  Table table() const;
  const Choices& mine() const { return routed_->choices(rank_.rank); }
  bool expert_major() const { return shape_.layout == XD_EP_EXPERT_MAJOR; }

  void write(Tensor& tensor, const Values& values) const;
  // Expects `values` in the first rows; the rows behind them are untouched.
  void expect(const char* name, const Tensor& tensor, const Values& values) const;
  void check_received() const;
  void check_tokens() const;
  int copies(int token) const;  // weighted number of copies in a token's sums

  const Rank& rank_;
  const FixedShape shape_;
  xd_ep_config config_;
  std::int64_t rows_ = 0;
  std::int64_t hidden_;
  int number_ = 0;
  std::optional<Routed> routed_;
  Buffer plan_;
  Tensor topk_idx_, hints_, tokens_, topk_weights_;
  Tensor recv_tokens_, recv_weights_;
  Tensor out_, grad_expert_out_, grad_weights_, grad_tokens_, grad_topk_weights_;
};

// A group and one step on it.
struct Stage {
  Stage(const Rank& of, const FixedShape& shape)
      : rank(of), group(make_group(of.comm, shape.config(of.num_ranks))), step(of, shape) {}

  void enqueue() { step.enqueue_all(group.get()); }
  // Waits for the operations, and expects what the loaded batch must end with.
  void expect_end() {
    const Outcome outcome = finish(rank, group.get(), XD_SUCCESS);
    if (outcome != step.expected()) ok(outcome);
    ASSERT_EQ(outcome, step.expected());
    step.check();
  }

  const Rank& rank;
  Group group;
  FixedStep step;
};

}  // namespace xd::test
