#include "gemm/cublasmp/kinds.h"

namespace xd::gemm::cublasmp {

// As same_operation() compares records.
Kinds::Kind Kinds::kind_of(const Record& r) {
  return {r.call.operation, r.algo,    r.a_type, r.b_type, r.d_type, r.epilogue, r.flags, r.k, r.n,
          r.fingerprint,    r.scaling, r.mover,  r.given};
}

std::string Kinds::refusal(const Record& record) const {
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(kind_of(record));
  return found == known_.end() ? "" : found->second;
}

bool Kinds::has_taken(const Record& record) const {
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(kind_of(record));
  return found != known_.end() && found->second.empty();
}

void Kinds::note(const Record& record, const std::string& refusal) {
  const std::lock_guard lock(mutex_);
  known_.insert_or_assign(kind_of(record), refusal);
}

}  // namespace xd::gemm::cublasmp
