// An argument of an operation in memory that may not be touched: the operation ends its process, by
// SIGSEGV, when it comes to read or write the argument.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "conformance/batch.h"
#include "faults/rank_program.h"

namespace xd::test {

// Whole pages of a file in memory, so that their content can be read whatever their protection.
class Pages {
 public:
  explicit Pages(std::size_t bytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::byte* data() const { return data_; }
  void forbid(std::size_t from) const;  // a whole number of pages
  std::vector<std::uint32_t> words() const;

  static std::size_t round_up(std::size_t bytes);

 private:
  int fd_ = -1;
  std::size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

class FatalArgument {
 public:
  // Replaces the argument in the batch's calls; its content is copied. From now on, or for
  // Part::second_pass when on_armed is called, it is fatal to touch that part of it.
  FatalArgument(Batch& batch, const RankProgram& program, int rank,
                const std::function<void()>& on_armed);
  ~FatalArgument();

 private:
  // The place in the pages where the argument begins, such that its fatal part begins a page.
  struct Extent {
    std::size_t begin, fatal;
  };
  static Extent extent_of(std::size_t bytes, Part part);
  void replace(Batch& batch, const RankProgram& program, std::byte* to);
  void await_first_pass(const std::vector<std::uint32_t>& ids);

  const Extent extent_;
  const Pages pages_;
  DLTensor tensor_{};
  std::atomic<bool> over_{false};
  std::thread watcher_;
};

}  // namespace xd::test
