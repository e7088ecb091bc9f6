// The operations of the CPU executor. Their steps are those of turn::HostOperation.
//
// A rank reads its peers' rows and terms where they lie: near ranks share their memory, so nothing
// is sent. Work that needs no peer is done in announce(), between telling peers of the call and
// waiting for them, so that a late peer costs no more than it must.
#pragma once

#include <exception>
#include <utility>

#include "gemm/calls.h"
#include "gemm/context.h"
#include "gemm/cpu/finish.h"
#include "gemm/cpu/lockstep.h"
#include "gemm/cpu/memory.h"
#include "gemm/cpu/multiply.h"

namespace xd::gemm::cpu {

struct Tools {
  const Context& context;
  Lockstep& lockstep;
  const Scratch& scratch;
  Multiplier& multiplier;
};

// Where peers find a tensor of this rank's: in symmetric memory if it lies there, else in the area
// at `staging`, to which stage() copies it.
class Offer {
 public:
  Offer() = default;
  Offer(const Tools& tools, const Tensor& tensor, std::uint64_t staging);
  void stage(const Tools& tools) const;
  turn::PeerAddress address() const { return address_; }

 private:
  Tensor tensor_{};
  turn::PeerAddress address_{};
  bool staged_ = false;
};

// Work that is done in announce(), which must not throw: what it throws is kept for move().
class Deferred {
 public:
  template <class Work>
  void run(Work&& work) noexcept {
    try {
      std::forward<Work>(work)();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  void rethrow() {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  std::exception_ptr error_{};
};

// The rows that an all_gather has gathered.
struct Gathered {
  const std::byte* data = nullptr;
  std::int64_t rows = 0, columns = 0;
  DType type = DType::f32;
};

class AllGatherOp {
 public:
  AllGatherOp(const Tools& tools, const ProductCall& call, xd_gemm_algo algo);

  Record record() const;
  void stage_in();
  void announce();
  OperationError obstacle() const { return {}; }
  void move();
  OperationError complete();

  // After complete(), where rows were gathered.
  Gathered gathered() const;

 private:
  bool gathers() const;
  std::byte* destination() const;
  // One rank's rows, where they lie, and their scales; this rank's or, in move(), any.
  const std::byte* rows_of(NearRank source) const;
  const float* scales_of(NearRank source) const;
  std::uint64_t scale_count(NearRank source) const;
  void gather(NearRank source) const;
  void gather_scales(NearRank source) const;
  // Computes the rows of D that a rank's rows give, or those of all ranks after they were gathered.
  void multiply(NearRank source);
  void multiply_gathered();
  void multiply(const Operand& a, std::int64_t first, std::int64_t rows);
  void move_all();

  Tools tools_;
  ProductCall call_;
  xd_gemm_algo algo_;
  Offer rows_;
  Finish finish_;
  Deferred deferred_{};
};

// reduce_scatter and all_reduce.
class ReduceOp {
 public:
  ReduceOp(const Tools& tools, const ProductCall& call);

  Record record() const { return record_of(call_, XD_GEMM_ALGO_SEQUENTIAL); }
  void stage_in();
  void announce();
  OperationError obstacle() const { return {}; }
  void move();
  OperationError complete();

 private:
  std::uint64_t row_bytes() const { return at(call_.n) * dtype_bytes(call_.wide_type()); }
  // A rank's terms of all rows.
  std::byte* terms_of(NearRank source) const;
  void compute_terms();
  void sum();

  Tools tools_;
  ProductCall call_;
  Finish finish_;
  Deferred deferred_{};
};

// bulk, and the gather that xd_gemm_start_all_gather begins.
class TransferOp {
 public:
  TransferOp(const Tools& tools, const TransferCall& call);

  Record record() const;
  void stage_in();
  void announce();
  OperationError obstacle() const { return {}; }
  void move();
  OperationError complete();

 private:
  const std::byte* rows_of(NearRank source) const;
  void gather() const;
  void reduce() const;

  Tools tools_;
  TransferCall call_;
  Offer rows_;
  Finish finish_;
  Deferred deferred_{};
};

// Column sums of D over all ranks, by ascending rank, from the sums of each rank's rows in
// bias_grad.
void reduce_column_sums(const Tools& tools, const ProductCall& call);

}  // namespace xd::gemm::cpu
