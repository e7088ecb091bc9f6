// One batch through a group: all five operations, every element of every output compared with the
// reference.
#pragma once

#include <crossdock/ep.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "conformance/case.h"
#include "conformance/image.h"
#include "conformance/reference.h"
#include "support/outcome.h"
#include "support/tensor.h"

namespace xd::test {

class Step {
 public:
  // `number` chooses one of the case's batches.
  Step(const Rank& rank, const Case& c, xd_ep_group* group, int number);

  // Sets the batch's table, where ids are those of logical experts.
  void set_table();
  void prepare();
  void dispatch();
  void combine();
  void combine_bwd();
  void dispatch_bwd();
  void run_all();  // in the order of a training step

  const Routed& routed() const { return routed_; }
  Buffer& plan() { return plan_; }
  // The number of rows dropped by the operations so far, by the group's status.
  std::int64_t reported_drops() const { return reported_drops_; }
  // Makes the operations read another plan; returns the one they read so far.
  Buffer exchange_plan(Buffer plan) { return std::exchange(plan_, std::move(plan)); }

 private:
  using Shape = std::vector<std::int64_t>;  // one or two extents
  using CodeAt = std::function<std::uint64_t(std::int64_t row, std::int64_t column)>;
  // The rows that dispatch carries.
  struct Payload {
    DLDataType type, recv_type, scale_type;
    std::int64_t columns, scale_columns;
    xd_ep_quantise quantise;
    bool scaled;  // scales travel with the rows
  };

  // Numbers that follow from the batch: equal on all ranks, and this rank's own.
  std::uint64_t common_chance(std::uint64_t salt) const;
  std::uint64_t own_chance(std::uint64_t salt) const;
  Element element(Content content, int rank, std::int64_t row, std::int64_t column) const;
  float weight(const Row& row, int k) const;          // weight of a token's choice
  float weight_at(int rank, std::int64_t row) const;  // weight in combine

  int tokens() const { return routed_.choices(rank_.rank).tokens; }
  const Received& received() const { return routed_.received(rank_.rank); }
  const Row& row_at(std::int64_t row) const {
    return received().rows[static_cast<std::size_t>(row)];
  }
  std::int64_t capacity() const;
  std::int64_t receive_rows(std::uint64_t salt) const;
  Shape choice_shape(std::int64_t rows) const;  // shape of receive weights: [R] or [R,K]
  Payload payload() const;

  // The alignment that the library asks of a tensor: rows of tokens are aligned to 16 bytes;
  // tensors beside them begin at any element; scales have any strides.
  enum class Grain { rows, elements, scales };
  // Make poisoned tensors, and tensors that hold `code`. `receive`: the tensor is on the receive
  // side, where padding and tail of an input hold values that must not be read.
  Tensor output(DLDataType type, Shape shape, bool receive, Grain grain = Grain::rows);
  Tensor token_input(DLDataType type, Shape shape, const CodeAt& code, Grain grain = Grain::rows);
  Tensor receive_input(DLDataType type, Shape shape, const CodeAt& code, Grain grain = Grain::rows);
  // Writes such a tensor again, as the current part may read it: later zones have values that must
  // not be read.
  void write_received(Tensor& tensor, const CodeAt& code) const;
  int part_of(std::int64_t row) const;                   // by its zone
  Spread spread(Grain grain, const Shape& shape) const;  // strides of the next tensor

  // Where the plan is refused, the tensor must be untouched. Otherwise rows are as `code` says, and
  // on the receive side padding is zero and the tail is zero or untouched. Before the last part
  // later zones may hold anything; the tail, and outputs by token, are untouched.
  void expect_received(const char* name, const Tensor& tensor, const CodeAt& code) const;
  void expect_tokens(const char* name, const Tensor& tensor, const CodeAt& code) const;
  enum class ChoiceField { weight, local_expert };
  void expect_choices(const char* name, const Tensor& tensor, ChoiceField field) const;
  void expect_plan_info() const;
  void expect_row_experts();
  void expect_dispatched(const Payload& payload, const Tensor& rows, const Tensor& scales) const;
  void combine_bwd_copied();
  CodeAt under_wire(std::int64_t columns, const ElementAt& element, const WeightAt* weight) const;
  void expect_status(xd_ep_operation operation, xd_status called);

  const Rank& rank_;
  const Case& case_;
  xd_ep_group* group_;
  int number_;
  std::uint64_t seed_;
  int topk_;
  Routed routed_;
  Buffer plan_;
  int row_units_;  // units of this batch's rows, at most the case's
  // Runs an operation in each part of the case in turn, or as a whole. Each call has a number of
  // multiprocessors of its own.
  template <class Args, class Run>
  void in_parts(Args& args, const Run& run);
  bool before_last_part() const { return part_ != 0 && part_ != case_.parts; }

  std::uint64_t tensors_ = 0;
  int part_ = 0;  // of the current call; 0 = the whole operation
  std::int64_t reported_drops_ = 0;
};

template <class Args, class Run>
void Step::in_parts(Args& args, const Run& run) {
  const int last = case_.parts > 1 ? case_.parts : 0;
  for (part_ = std::min(1, last); part_ <= last; ++part_) {
    const std::uint64_t chance = own_chance(100 + ++tensors_);
    args.part = part_;
    args.num_sms = chance % 2 == 0 ? 0 : 1 + static_cast<std::int32_t>(chance / 2 % 4);
    run();
  }
  part_ = 0;
}

}  // namespace xd::test
