// Local calls on the rows of a range of experts.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "ep/executors.h"
#include "ep/plan/parts.h"
#include "moe/calls.h"
#include "moe/executors.h"

namespace xd::moe {

struct Range {
  std::int32_t first, count;
};

// Half of the columns of [R,2F], the first (0) or the second (1).
inline Tensor half_of(const Tensor& inner, int which) {
  Tensor half = inner;
  half.cols = inner.cols / 2;
  if (half.data != nullptr) half.data += which * static_cast<std::int64_t>(half.row_bytes());
  return half;
}

// Makes the calls of one pass, and starts them.
class Rows {
 public:
  Rows(const ep::Group& group, const Experts& experts)
      : experts_(experts),
        device_(group.comm().device()),
        executor_(ep::experts_executor_for(device_.device_type)) {}

  bool none() const { return experts_.count == 0; }
  Range all() const { return {0, experts_.count}; }
  // The experts of a part from 1, or all (0).
  Range range_of(int part, int parts) const {
    if (part == 0) return all();
    const int first = ep::first_expert_of_part(part, parts, experts_.count);
    return {first, ep::first_expert_of_part(part + 1, parts, experts_.count) - first};
  }

  ep::GroupedProductCall product(const Tensor& a, const ep::Matrices& b, const Tensor& d,
                                 const Range& range) const {
    ep::GroupedProductCall call{};
    fill(call, a, range);
    call.b = b;
    call.d = d;
    return call;
  }
  ep::GroupedOuterCall outer(const Tensor& a, const Tensor& b, const ep::Matrices& d,
                             bool accumulate) const {
    ep::GroupedOuterCall call{};
    fill(call, a, all());
    call.accumulate = accumulate;
    call.b = b;
    call.d = d;
    return call;
  }
  // Of the forward pass; the backward pass adds its tensors.
  ep::GatedCall gated(const Tensor& inner, const Range& range) const {
    ep::GatedCall call{};
    call.activation = experts_.activation;
    call.gate = half_of(inner, 0);
    call.up = half_of(inner, 1);
    call.offsets = experts_.offsets;
    call.first_expert = range.first;
    call.end_expert = range.first + range.count;
    return call;
  }

  void check(std::initializer_list<Tensor> tensors) const { require_memory(device_, tensors); }
  void check(const ep::GroupedProductCall& call) const { executor_.check_product(call, device_); }
  void check(const ep::GroupedOuterCall& call) const { executor_.check_outer(call, device_); }
  void start(const ep::GroupedProductCall& call, xd_stream stream) const {
    executor_.grouped_product(call, device_, stream);
  }
  void start(const ep::GroupedOuterCall& call, xd_stream stream) const {
    executor_.grouped_outer(call, device_, stream);
  }
  void start(const ep::GatedCall& call, xd_stream stream) const {
    executor_.gated(call, device_, stream);
  }

 private:
  void fill(ep::GroupedCall& call, const Tensor& a, const Range& range) const {
    call.a = a;
    call.offsets = experts_.offsets;
    call.first_expert = range.first;
    call.num_experts = range.count;
    call.near_ranks = experts_.near_ranks;
  }

  const Experts& experts_;
  const DLDevice device_;
  const ep::ExpertsExecutor& executor_;
};

}  // namespace xd::moe
