#include "gemm/cublasmp/errand.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "base/thread.h"

namespace xd::gemm::cublasmp {

bool Errand::run(std::function<void()> work, const Deadline& deadline,
                 const std::function<void()>& look) {
  constexpr int kLookAgainMs = 100;
  const auto errand = std::make_shared<Errand>(std::move(work));
  start_thread("xd-cublasmp", [errand] { errand->do_it(); }).detach();
  for (;;) {
    const Deadline next = Deadline::after_ms(kLookAgainMs);
    if (errand->has_ended(next.when() < deadline.when() ? next : deadline)) break;
    if (deadline.passed()) return false;
    if (look) look();
  }
  if (errand->failure_) throw *errand->failure_;
  return true;
}

bool Errand::has_ended(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline.when(), [this] { return ended_; });
}

void Errand::do_it() noexcept {
  std::optional<Error> failure;
  try {
    work_();
  } catch (const Error& error) {
    failure = error;
  } catch (...) {
    failure = Error(XD_ERROR_OUT_OF_MEMORY, std::string());
  }
  work_ = {};
  const std::lock_guard lock(mutex_);
  failure_ = std::move(failure);
  ended_ = true;
  changed_.notify_all();
}

void keep_for_good(std::shared_ptr<const void> object) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(object));
}

}  // namespace xd::gemm::cublasmp
