// Groups, or contexts of products, that operations run on, and the numbers by which handlers find
// them.
#pragma once

#include <crossdock/crossdock.h>

#include <atomic>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "each.h"
#include "problem.h"
#include "ranks.h"
#include "worker.h"

namespace xdjax {

// One config's groups, or contexts, on all ranks of this process; a family (experts.h, products.h)
// says which. It lives as long as its maker, an executable that uses it, or an operation that runs,
// and keeps the communicators alive.
template <class Family>
class Sequence {
 public:
  struct Member {
    typename Family::Handle* handle = nullptr;
    int rank = 0;
    DLDevice device{};
    std::unique_ptr<Worker> worker;  // runs the operations; none on CUDA, which has streams
  };

  // `text`: the config, as executables name it.
  Sequence(std::shared_ptr<Ranks> ranks, typename Family::Config config, std::string text)
      : ranks_(std::move(ranks)), config_(std::move(config)), text_(std::move(text)) {}
  ~Sequence() {
    for (Member& member : members_) {
      member.worker.reset();
      Family::destroy(member.handle);
    }
  }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Makes the groups or contexts, unless they have been made. Collective, blocking.
  std::optional<Problem> create();

  // The rank on the device that XLA calls `ordinal`; NULL if there is none.
  [[nodiscard]] Member* on_device(int ordinal);

  // Calls fn(Handle*) -> xd_status for every rank, on the thread that runs its operations, after
  // create(). Waits for all.
  template <class Fn>
  std::optional<Problem> on_all(Fn fn);

  // The member of the ranks' all()[index]; NULL before create(), for which it does not wait.
  [[nodiscard]] const Member* member(std::size_t index) const {
    return created_.load(std::memory_order_acquire) ? &members_[index] : nullptr;
  }

  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  const std::shared_ptr<Ranks> ranks_;
  const typename Family::Config config_;
  const std::string text_;
  std::mutex creating_;                // held by create(), which waits for other ranks
  std::atomic<bool> created_ = false;  // set when members_ will not change any more
  std::vector<Member> members_;        // one per entry of ranks_->all()
};

template <class Family>
std::optional<Problem> Sequence<Family>::create() {
  const std::lock_guard lock(creating_);
  if (created_.load(std::memory_order_relaxed)) return std::nullopt;
  const std::vector<Ranks::Rank>& ranks = ranks_->all();
  std::vector<Member> members(ranks.size());
  std::optional<Problem> problem = for_each_rank(ranks.size(), [&](std::size_t i) {
    return problem_of(Family::create(ranks[i].comm, config_, &members[i].handle));
  });
  if (problem) {
    for (const Member& member : members) Family::destroy(member.handle);
    return problem;
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    members[i].rank = ranks[i].rank;
    members[i].device = ranks[i].device;
    if (ranks[i].device.device_type == kDLCPU) members[i].worker = std::make_unique<Worker>();
  }
  members_ = std::move(members);
  created_.store(true, std::memory_order_release);
  return std::nullopt;
}

template <class Family>
typename Sequence<Family>::Member* Sequence<Family>::on_device(int ordinal) {
  const std::vector<Ranks::Rank>& ranks = ranks_->all();
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (ranks[i].ordinal == ordinal || ranks[i].ordinal == any_ordinal) return &members_[i];
  }
  return nullptr;
}

template <class Family>
template <class Fn>
std::optional<Problem> Sequence<Family>::on_all(Fn fn) {
  return for_each_rank(members_.size(), [&](std::size_t i) {
    const Member& member = members_[i];
    if (member.worker == nullptr) return problem_of(fn(member.handle));
    // The worker may be in set_value() still when the result is here.
    const auto done = std::make_shared<std::promise<std::optional<Problem>>>();
    std::future<std::optional<Problem>> result = done->get_future();
    member.worker->post([&, done] { done->set_value(problem_of(fn(member.handle))); });
    return result.get();
  });
}

// The sequences of a family in this process, by numbers that no other one of the family ever gets.
template <class Family>
class Registry {
 public:
  // It is never destroyed, since executables may outlive static objects.
  static Registry& get() {
    static auto* const made = new Registry;
    return *made;
  }

  std::int64_t enter(const std::shared_ptr<Sequence<Family>>& sequence) {
    const std::lock_guard lock(mutex_);
    std::erase_if(sequences_, [](const auto& entry) { return entry.second.expired(); });
    sequences_.emplace(++last_, sequence);
    return last_;
  }

  // NULL if it is gone, or never existed.
  std::shared_ptr<Sequence<Family>> find(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = sequences_.find(number);
    return found == sequences_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::int64_t last_ = 0;
  std::map<std::int64_t, std::weak_ptr<Sequence<Family>>> sequences_;
};

}  // namespace xdjax
