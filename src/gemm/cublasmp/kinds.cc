#include "gemm/cublasmp/kinds.h"

#include <algorithm>

#include "base/error.h"

namespace xd::gemm::cublasmp {

bool Kinds::same_kind(const Record& a, Record b) {
  b.tag = a.tag;
  return a.call.operation == b.call.operation && same_operation(a, b);
}

const Kinds::Known* Kinds::find(const Record& record) const {
  const auto found = std::find_if(known_.begin(), known_.end(), [&](const Known& known) {
    return same_kind(known.kind, record);
  });
  return found == known_.end() ? nullptr : &*found;
}

std::string Kinds::obstacle(const Record& record) const {
  const std::lock_guard lock(mutex_);
  if (!apart_.empty()) return apart_;
  const Known* known = find(record);
  return known == nullptr ? "" : known->refusal;
}

bool Kinds::is_taken(const Record& record) const {
  const std::lock_guard lock(mutex_);
  const Known* known = find(record);
  return known != nullptr && known->refusal.empty();
}

void Kinds::note(const Record& record, const std::string& refusal) {
  const std::lock_guard lock(mutex_);
  std::erase_if(known_, [&](const Known& known) { return same_kind(known.kind, record); });
  if (known_.size() >= kMost) known_.clear();
  known_.push_back({record, refusal});
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
