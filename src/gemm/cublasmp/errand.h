// Calls that may never return: they run on threads of their own, which are left alone where they
// take too long.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "base/deadline.h"
#include "base/error.h"

namespace xd::gemm::cublasmp {

class Errand {
 public:
  explicit Errand(std::function<void()> work) : work_(std::move(work)) {}

  // False: `work` has not ended by the deadline. It owns all that it uses, since it may outlive the
  // caller. Throws what it has thrown, or what look() throws, which is asked ten times a second.
  static bool run(std::function<void()> work, const Deadline& deadline,
                  const std::function<void()>& look = {});

 private:
  void do_it() noexcept;
  bool has_ended(const Deadline& deadline);

  std::function<void()> work_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::optional<Error> failure_;
};

// Never frees the object, which something that still runs may use. It can be found from here, so
// that it is not lost.
void keep_for_good(std::shared_ptr<const void> object);

}  // namespace xd::gemm::cublasmp
