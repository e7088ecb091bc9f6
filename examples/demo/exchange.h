// All that the demo asks of Crossdock, in the order in which a layer needs it.
#pragma once

#include <crossdock/crossdock.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "layer.h"

namespace demo {

// Throws std::runtime_error with the library's text.
void ok(xd_status status);

// An array of equal size on every rank that all of them can read.
template <class T>
class Shared {
 public:
  Shared(xd_comm* comm, std::size_t count) : comm_(comm), count_(count) {
    void* data = nullptr;
    ok(xd_mem_alloc(comm_, count * sizeof(T), &data));
    mine_ = static_cast<T*>(data);
    std::fill_n(mine_, count, T{});
    ok(xd_mem_export(comm_, data, &handle_));
  }
  std::span<T> mine() const { return {mine_, count_}; }
  // Another rank's. Every rank makes its arrays in the same order, so that their handles differ in
  // the rank only. The caller puts a barrier between the write and the read.
  std::span<const T> of(int rank) const {
    xd_mem_handle handle = handle_;
    handle.rank = rank;
    void* data = nullptr;
    ok(xd_mem_import(comm_, &handle, &data));
    return {static_cast<const T*>(data), count_};
  }

 private:
  xd_comm* comm_;  // the memory goes with it
  std::size_t count_;
  T* mine_ = nullptr;
  xd_mem_handle handle_{};
};

// This rank's communicator, made from the environment that crossdock-run (or torchrun) sets.
class Exchange {
 public:
  Exchange(Sizes sizes, std::size_t heap_bytes);

  const Sizes& sizes() const { return sizes_; }  // with the number of ranks
  int rank() const { return rank_; }
  std::size_t recv_rows() const { return recv_rows_; }
  xd_comm* comm() const { return comm_.get(); }
  void barrier() { ok(xd_comm_barrier(comm_.get())); }

  // Exchanges the routing of a batch; offsets [L+1] are those of the experts' zones.
  void prepare(std::span<const std::int32_t> ids, std::span<std::int32_t> counts,
               std::span<std::int32_t> offsets);
  void dispatch(std::span<const float> tokens, std::span<const float> weights,
                std::span<float> recv_tokens, std::span<float> recv_weights);
  void combine(std::span<const float> expert_out, std::span<const float> recv_weights,
               std::span<float> out);

  struct CombineGradients {
    std::span<const float> out;     // in  [T,H]
    std::span<float> expert_out;    // out [R,H]
    std::span<float> recv_weights;  // out [R]
  };
  void combine_backward(std::span<const float> expert_out, std::span<const float> recv_weights,
                        const CombineGradients& gradients);

  struct DispatchGradients {
    std::span<const float> recv_tokens;   // in  [R,H]
    std::span<const float> recv_weights;  // in  [R]
    std::span<float> tokens;              // out [T,H]
    std::span<float> weights;             // out [T,K]
  };
  void dispatch_backward(const DispatchGradients& gradients);

 private:
  struct DestroyComm {
    void operator()(xd_comm* comm) const { xd_comm_destroy(comm); }
  };
  struct DestroyGroup {
    void operator()(xd_ep_group* group) const { xd_ep_group_destroy(group); }
  };
  struct alignas(16) PlanUnit {
    std::byte bytes[16];
  };
  template <class Args>
  Args with_plan(Args args);

  Sizes sizes_;
  int rank_ = 0;
  std::size_t recv_rows_ = 0;
  std::unique_ptr<xd_comm, DestroyComm> comm_;
  std::unique_ptr<xd_ep_group, DestroyGroup> group_;
  std::vector<PlanUnit> plan_;
};

}  // namespace demo
