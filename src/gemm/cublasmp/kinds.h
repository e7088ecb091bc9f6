// The kinds of products that cuBLASMp has been asked to enqueue: it may refuse one then, and not
// before. A kind is all that ranks compare of a call but its tag, so it is the same on all of them,
// and so is what they know of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "gemm/family.h"

namespace xd::gemm::cublasmp {

enum class TakenBy { all, none, some };  // ranks

class Kinds {
 public:
  // Before it knows more, it forgets them all. Ranks learn of kinds in the same order, so they
  // forget them in the same turn.
  static constexpr std::size_t kMost = 1024;

  // The reason why cuBLASMp computes no such product; empty if none is known. Any thread.
  std::string obstacle(const Record& record) const;
  // Enqueues a product on which the ranks have agreed, all ranks at once, one thread at a time.
  // `enqueue` throws UNSUPPORTED where cuBLASMp refuses it. `meet` takes this rank to a meeting
  // with that record, and returns whether all ranks have brought the same.
  //
  // The ranks meet behind the first product of a kind, those where it is refused with kIsRefused in
  // their records. So all of them hear whether it is taken. Where it is so by some ranks alone, the
  // records differ, and every product has an obstacle from then on. No rank comes to a meeting for
  // a kind that is known to be taken: a refusal is INTERNAL then.
  TakenBy enqueue(const Record& record, const std::function<void()>& enqueue,
                  const std::function<bool(const Record&)>& meet);

 private:
  struct Known {
    Record kind;
    std::string refusal;  // empty = taken
  };
  static bool same_kind(const Record& a, Record b);
  const Known* find(const Record& record) const;
  bool is_taken(const Record& record) const;
  void note(const Record& record, const std::string& refusal);
  void note_apart(const std::string& refusal);

  mutable std::mutex mutex_;  // explain() may be called beside an operation
  std::vector<Known> known_;
  std::string apart_;  // not empty = ranks do not agree what cuBLASMp takes
};

}  // namespace xd::gemm::cublasmp
