// Valid arguments of all five operations for one batch, for tests that damage one of them.
#pragma once

#include <crossdock/ep.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "conformance/case.h"
#include "conformance/reference.h"
#include "support/outcome.h"
#include "support/tensor.h"

namespace xd::test {

// A batch that any number of ranks can run: three choices per token, weights, bf16, and rows on
// every rank. Each test changes the part that it is about.
Case plain_case(int num_ranks);

class Batch {
 public:
  enum class Role { token_input, token_output, receive_input, receive_output };

  // A tensor argument: the place of its pointer, and the tensor that the batch passes there.
  struct Field {
    xd_ep_operation operation;
    const char* name;
    const DLTensor** slot;
    Role role;
    Tensor* tensor;
    bool output;
  };

  Batch(const Rank& rank, const Case& c, int number = 0, Place place = Place::ordinary);

  // Makes the call and waits until the operation has ended.
  Outcome call(xd_ep_group* group, xd_ep_operation operation);
  // Makes the call only; where operations are asynchronous, finish() tells how it ended.
  xd_status enqueue(xd_ep_group* group, xd_ep_operation operation);
  void prepare(xd_ep_group* group) { ok(call(group, XD_EP_PREPARE)); }

  std::vector<Field>& fields() { return fields_; }
  Field& field(xd_ep_operation operation, const std::string& name);
  Buffer& plan() { return plan_; }
  void use_plan(const void* plan, std::size_t bytes);  // in all operations but prepare
  const Routed& routed() const { return routed_; }

  // True if no output of this operation, and no byte beside any tensor, has been written.
  bool untouched(xd_ep_operation operation) const;
  bool guards_intact() const;
  void poison_outputs();

  xd_ep_prepare_args prepare_args = XD_EP_PREPARE_ARGS_INIT;
  xd_ep_dispatch_args dispatch_args = XD_EP_DISPATCH_ARGS_INIT;
  xd_ep_combine_args combine_args = XD_EP_COMBINE_ARGS_INIT;
  xd_ep_dispatch_bwd_args dispatch_bwd_args = XD_EP_DISPATCH_BWD_ARGS_INIT;
  xd_ep_combine_bwd_args combine_bwd_args = XD_EP_COMBINE_BWD_ARGS_INIT;

  Batch(const Batch&) = delete;  // fields point into this object
  Batch& operator=(const Batch&) = delete;

 private:
  struct Spec {
    xd_ep_operation operation;
    const char* name;
    const DLTensor** slot;
    Role role;
    DLDataType type;
    std::vector<std::int64_t> shape;
  };
  void add(const Spec& spec);
  void add_prepare(const Case& c);
  void add_dispatch(const Case& c);
  void add_backward(const Case& c);

  const Rank& rank_;
  Place place_;
  std::uint64_t seed_;
  int topk_;
  Routed routed_;
  Buffer plan_;
  std::deque<Tensor> tensors_;
  std::vector<Field> fields_;
};

}  // namespace xd::test
