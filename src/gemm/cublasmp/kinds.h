// The kinds of products that cuBLASMp has been asked to enqueue: it may refuse one then, and not
// before. A kind is all that ranks compare of a call but its tag, so it is the same on all of them,
// and so is what they know of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "gemm/family.h"

namespace xd::gemm::cublasmp {

class Kinds {
 public:
  // The reason why cuBLASMp refuses such products; empty if none is known. Any thread.
  std::string refusal(const Record& record) const;
  // Whether cuBLASMp takes such products on all ranks.
  bool has_taken(const Record& record) const;
  void note_taken(const Record& record) { note(record, ""); }
  void note_refused(const Record& record, const std::string& reason) { note(record, reason); }

 private:
  using Kind = std::tuple<std::uint8_t, std::uint8_t, std::uint8_t, std::uint8_t, std::uint8_t,
                          std::uint8_t, std::uint8_t, std::uint32_t, std::uint32_t, std::uint64_t,
                          std::uint16_t, std::uint8_t, std::uint8_t>;
  static Kind kind_of(const Record& record);
  void note(const Record& record, const std::string& refusal);

  mutable std::mutex mutex_;           // explain() may be called beside an operation
  std::map<Kind, std::string> known_;  // empty = taken, else why it is refused
};

}  // namespace xd::gemm::cublasmp
