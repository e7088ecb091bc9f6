// An argument of an operation in memory that may not be touched: the operation ends its process, by
// SIGSEGV, when it comes to read or write the argument.
#pragma once

#include <cstddef>

#include "conformance/batch.h"
#include "faults/rank_program.h"

namespace xd::test {

// Whole pages of memory.
class Pages {
 public:
  explicit Pages(std::size_t bytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::byte* data() const { return data_; }
  void forbid(std::size_t from) const;  // a whole number of pages

  static std::size_t round_up(std::size_t bytes);

 private:
  std::size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

class FatalArgument {
 public:
  // Replaces the argument in the batch's calls; its content is copied. From now on it is fatal to
  // touch the part of it that the program names.
  FatalArgument(Batch& batch, const RankProgram& program);

 private:
  // The place in the pages where the argument begins, such that its fatal part begins a page.
  struct Extent {
    std::size_t begin, fatal;
  };
  static Extent extent_of(std::size_t bytes, Part part);
  void replace(Batch& batch, const RankProgram& program, std::byte* to);

  const Extent extent_;
  const Pages pages_;
  DLTensor tensor_{};
};

}  // namespace xd::test
