#include "gemm/cublasmp/kinds.h"

#include "base/error.h"

namespace xd::gemm::cublasmp {

// As same_operation() compares records.
Kinds::Kind Kinds::kind_of(const Record& r) {
  return {r.call.operation, r.algo,    r.a_type, r.b_type, r.d_type, r.epilogue, r.flags, r.k, r.n,
          r.fingerprint,    r.scaling, r.mover,  r.given};
}

std::string Kinds::obstacle(const Record& record) const {
  const std::lock_guard lock(mutex_);
  if (!apart_.empty()) return apart_;
  const auto found = known_.find(kind_of(record));
  return found == known_.end() ? "" : found->second;
}

bool Kinds::is_taken(const Record& record) const {
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(kind_of(record));
  return found != known_.end() && found->second.empty();
}

void Kinds::note(const Record& record, const std::string& refusal) {
  const std::lock_guard lock(mutex_);
  if (known_.size() >= kMost) known_.clear();
  known_.insert_or_assign(kind_of(record), refusal);
}

void Kinds::note_apart(const std::string& refusal) {
  const std::lock_guard lock(mutex_);
  apart_ = concat("cuBLASMp has refused a product on some ranks and taken it on others, here it ",
                  refusal.empty() ? "has taken it" : "has refused it: ", refusal);
}

TakenBy Kinds::enqueue(const Record& record, const std::function<void()>& enqueue,
                       const std::function<bool(const Record&)>& meet) {
  std::string refusal;
  try {
    enqueue();
  } catch (const Error& error) {
    if (error.status() != XD_ERROR_UNSUPPORTED) throw;
    refusal = error.what();
  }
  const bool refused = !refusal.empty();
  if (is_taken(record)) {
    if (!refused) return TakenBy::all;
    fail(XD_ERROR_INTERNAL, refusal, ", though it has taken such a product before");
  }
  Record with_answer = record;
  if (refused) with_answer.given |= kIsRefused;
  if (!meet(with_answer)) {
    note_apart(refusal);
    return TakenBy::some;
  }
  note(record, refusal);
  return refused ? TakenBy::none : TakenBy::all;
}

}  // namespace xd::gemm::cublasmp
