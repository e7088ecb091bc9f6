// A rank's engine, made together with those of the other ranks, and its attendant. The functions
// that make an engine wait for ranks without a bound, so they run on a thread of their own, which
// is left alone where it takes too long.
#pragma once

#include <memory>
#include <string>

#include "comm/comm.h"
#include "gemm/cublasmp/attendant.h"
#include "gemm/cublasmp/engine.h"

namespace xd::gemm::cublasmp {

class AttendedEngine {
 public:
  // Collective: all ranks have an engine, or none has. Without config.allow_fallback, having none
  // throws UNSUPPORTED with the reason, on all ranks. Its end is that of Attendant.
  AttendedEngine(Comm& comm, const Config& config);

  // nullptr = there is none, and why_not() says why.
  Engine* get() const { return attendant_ ? &attendant_->engine() : nullptr; }
  const std::string& why_not() const { return why_not_; }
  void enqueue(const ProductTurn& turn, const Description& description, const Operands& operands,
               cudaStream_t stream) {
    attendant_->enqueue(turn, description, operands, stream);
  }

 private:
  std::string why_not_;
  std::unique_ptr<Attendant> attendant_;
};

}  // namespace xd::gemm::cublasmp
