#include "moe/layer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "moe/calls.h"
#include "moe/executors.h"
#include "moe/rows.h"
#include "moe/turns.h"
#include "observe/subject.h"
#include "turn/operation_error.h"

namespace xd::moe {
namespace {

using ep::Group;

// In the order of xd_ep_operation.
constexpr const char* kFunctions[] = {"xd_ep_prepare", "xd_ep_dispatch", "xd_ep_combine",
                                      "xd_ep_dispatch_bwd", "xd_ep_combine_bwd"};

// Takes this rank's turn in the next operation, body(operation), which counts like a call of the
// caller's.
template <class Body>
void operate(const Group& group, Turns& turns, Body&& body) {
  const xd_ep_operation operation = turns.enter();
  observe::Call watched(kFunctions[operation], group.subject(), operation);
  try {
    std::forward<Body>(body)(operation);
  } catch (...) {
    std::array<char, 1> text;
    watched.end(caught(text).status);
    throw;
  }
  watched.end(XD_SUCCESS);
  turns.leave();
}

// Ends a pass with the error in flight, called inside a catch block: takes the turns that peers
// still wait for with that error, and throws it.
[[noreturn]] void give_up(Group& group, Turns& turns, Streams& streams) {
  const auto error = turn::current_operation_error<ep::Family>(group.rank());
  std::exception_ptr first = turns.inside() ? std::current_exception() : nullptr;
  for (int owed = turns.owed(); owed > 0; --owed) {
    try {
      operate(group, turns, [&](xd_ep_operation operation) {
        group.join_failed(operation, Error(error.status, error.text), streams.transfers());
      });
    } catch (...) {  // with what the turn adds to the error
      if (first == nullptr) first = std::current_exception();
    }
  }
  try {
    streams.end();
  } catch (...) {  // the first error is the one that counts
  }
  if (first != nullptr) std::rethrow_exception(first);
  throw;
}

// The order that both passes have: all parts of an operation that moves rows, then for each part
// its experts, and that part of an operation that makes sums. Between the parts of the latter a
// group runs nothing else.
class Pass {
 public:
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

 protected:
  Pass(Group& group, Turns& turns, Streams& streams, const Schedule& schedule,
       const Experts& experts)
      : group_(group),
        turns_(turns),
        streams_(streams),
        schedule_(schedule),
        rows_(group, experts) {}
  ~Pass() = default;

  int calls() const { return turns_.calls(); }
  // Of an operation's call, from 1; 0 where one call does it all.
  int part_of(int call) const { return schedule_.parts > 1 ? call : 0; }
  Range range_of(int call) const { return rows_.range_of(part_of(call), schedule_.parts); }
  // The multiprocessors of a call that runs beside products, or of one that does not.
  int num_sms(bool beside) const { return beside && schedule_.parts > 0 ? schedule_.num_sms : 0; }

  // A call of the operation that moves rows.
  template <class Args>
  void move(int call, Args args, void (Group::*start)(const Args*, xd_stream)) {
    args.num_sms = num_sms(call > 1);
    operate(group_, turns_, [&](auto) { (group_.*start)(&args, streams_.transfers()); });
    arrived_[at(call)] = streams_.mark(streams_.transfers());
  }

  // The experts of a call's rows, on `stream`, and then a call of the operation that sums them.
  template <class Experts, class Args>
  void sum(int call, bool beside, Experts&& experts, Args args,
           void (Group::*start)(const Args*, xd_stream)) {
    const xd_stream products = streams_.products(call);
    streams_.wait(arrived_[at(call)], products);
    if (!rows_.none()) experts(range_of(call), products);
    streams_.wait(streams_.mark(products), streams_.transfers());
    args.num_sms = num_sms(beside);
    operate(group_, turns_, [&](auto) { (group_.*start)(&args, streams_.transfers()); });
  }

  Group& group_;
  Turns& turns_;
  Streams& streams_;
  const Schedule schedule_;
  const Rows rows_;

 private:
  std::array<Streams::Mark, ep::kMaxParts + 1> arrived_{};
};

class Forward : Pass {
 public:
  Forward(Group& group, Turns& turns, Streams& streams, const ForwardCall& call)
      : Pass(group, turns, streams, call.schedule, call.experts), call_(call) {}

  // Throws what products would throw of their arguments, and of memory that only later calls see.
  void check() const {
    rows_.check({call_.inner, call_.results, call_.sums});
    if (rows_.none()) return;
    rows_.check(first_product(rows_.all()));
    rows_.check(second_product(rows_.all()));
  }

  void run() {
    for (int call = 1; call <= calls(); ++call) {
      move(call, dispatch_args(call_, part_of(call)), &Group::dispatch);
      if (call == 1) group_.count_tokens(*call_.tokens);
    }
    for (int call = 1; call <= calls(); ++call) {
      sum(
          call, call < calls(),
          [this](const Range& range, xd_stream products) { compute(range, products); },
          combine_args(call_, part_of(call)), &Group::combine);
      if (call == 1) group_.count_tokens(*call_.out);
    }
  }

 private:
  ep::GroupedProductCall first_product(const Range& range) const {
    return rows_.product(call_.rows, call_.experts.w_in, call_.inner, range);
  }
  ep::GroupedProductCall second_product(const Range& range) const {
    return rows_.product(call_.activated, call_.experts.w_out, call_.results, range);
  }
  void compute(const Range& range, xd_stream stream) const {
    rows_.start(first_product(range), stream);
    ep::GatedCall gated = rows_.gated(call_.inner, range);
    gated.out = call_.activated;
    rows_.start(gated, stream);
    rows_.start(second_product(range), stream);
  }

  const ForwardCall& call_;
};

class Backward : Pass {
 public:
  Backward(Group& group, Turns& turns, Streams& streams, const BackwardCall& call)
      : Pass(group, turns, streams, call.schedule, call.experts), call_(call) {}

  void check() const {
    rows_.check({call_.inner, call_.grad_rows, call_.sums, call_.weight_sums});
    if (rows_.none()) return;
    rows_.check(first_product(rows_.all()));
    rows_.check(second_product(rows_.all()));
    if (call_.grad_w_out.data != nullptr) rows_.check(grad_w_out());
    if (call_.grad_w_in.data != nullptr) rows_.check(grad_w_in());
  }

  void run() {
    for (int call = 1; call <= calls(); ++call) {
      move(call, combine_bwd_args(call_, part_of(call)), &Group::combine_bwd);
      if (call == 1) group_.count_tokens(*call_.grad_out);
    }
    for (int call = 1; call <= calls(); ++call) {
      sum(
          call, call < calls() || has_products_for_weights(),
          [this](const Range& range, xd_stream products) { compute(range, products); },
          dispatch_bwd_args(call_, part_of(call)), &Group::dispatch_bwd);
      if (call == 1) group_.count_tokens(*call_.grad_tokens);
    }
    if (has_products_for_weights()) compute_for_weights();
  }

 private:
  bool has_products_for_weights() const {
    return call_.grad_w_in.data != nullptr || call_.grad_w_out.data != nullptr;
  }
  ep::GroupedProductCall first_product(const Range& range) const {
    return rows_.product(call_.grad_results, call_.experts.w_out.transposed(), call_.grad_activated,
                         range);
  }
  ep::GroupedProductCall second_product(const Range& range) const {
    return rows_.product(call_.grad_inner, call_.experts.w_in.transposed(), call_.grad_rows, range);
  }
  ep::GroupedOuterCall grad_w_out() const {
    return rows_.outer(call_.activated, call_.grad_results, call_.grad_w_out, call_.accumulate);
  }
  ep::GroupedOuterCall grad_w_in() const {
    return rows_.outer(call_.rows, call_.grad_inner, call_.grad_w_in, call_.accumulate);
  }
  void compute(const Range& range, xd_stream stream) const {
    rows_.start(first_product(range), stream);
    ep::GatedCall gated = rows_.gated(call_.inner, range);
    gated.grad_out = call_.grad_activated;
    gated.grad_gate = half_of(call_.grad_inner, 0);
    gated.grad_up = half_of(call_.grad_inner, 1);
    rows_.start(gated, stream);
    rows_.start(second_product(range), stream);
  }
  // Products over all rows, which come last: beside the operation that makes sums, where streams
  // are more than one. Rows of all parts have been written, on either stream of products.
  void compute_for_weights() {
    const xd_stream one = streams_.products(1), other = streams_.products(2);
    const Streams::Mark first = streams_.mark(one), second = streams_.mark(other);
    streams_.wait(first, other);
    streams_.wait(second, one);
    if (call_.grad_w_out.data != nullptr) rows_.start(grad_w_out(), one);
    if (call_.grad_w_in.data != nullptr) rows_.start(grad_w_in(), other);
  }

  const BackwardCall& call_;
};

// Marks a group's passes as in use by this thread, as turn/host/calls.h does with operations.
class Claim {
 public:
  Claim(const Group& group, Passes& passes, xd_ep_operation first) : busy_(passes.busy) {
    group.comm().errors().check_usable();
    if (busy_.exchange(true, std::memory_order_acquire)) {
      group.comm().errors().raise_and_throw(group.own_fatal_error(XD_ERROR_BUSY, first),
                                            Spread::everywhere);
    }
  }
  ~Claim() { busy_.store(false, std::memory_order_release); }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

 private:
  std::atomic<bool>& busy_;
};

// Reads a pass's arguments and runs it: operations that move rows, and as many that sum them.
template <class Run, class Call, class Args>
void run(Group& group, Passes& passes, xd_ep_operation moves, xd_ep_operation sums,
         const Args* args, Call (*read)(const Args*, const Group&), xd_stream stream) {
  const Claim claim(group, passes, moves);
  const DLDevice device = group.comm().device();
  Turns turns(moves, sums, parts_of(args, group), device.device_type != kDLCPU);
  Streams serial;
  serial.begin(stream);
  Streams* streams = &serial;
  try {
    const Call call = read(args, group);
    Run(group, turns, serial, call).check();
    if (call.schedule.parts > 0) {
      if (!passes.streams) passes.streams = make_streams(device);
      passes.streams->begin(stream);
      streams = passes.streams.get();
    }
    Run(group, turns, *streams, call).run();
  } catch (...) {
    give_up(group, turns, *streams);
  }
  streams->end();
}

}  // namespace

void forward(Group& group, Passes& passes, const xd_moe_forward_args* args, xd_stream stream) {
  run<Forward>(group, passes, XD_EP_DISPATCH, XD_EP_COMBINE, args, read_forward, stream);
}

void backward(Group& group, Passes& passes, const xd_moe_backward_args* args, xd_stream stream) {
  run<Backward>(group, passes, XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD, args, read_backward, stream);
}

}  // namespace xd::moe
