#include "comm/wait_notes.h"

#include <algorithm>
#include <chrono>
#include <span>

#include "base/math.h"

namespace xd {
namespace {

// Near ranks believe no note at which its rank has not looked for so long; remote ones none that is
// so much later than it has said.
constexpr std::int64_t kOldMs = 3500;
// Remote ranks hear from a rank that waits so often: the longer it waits, the more rarely.
constexpr std::int64_t kShortestPauseMs = 1000, kLongestPauseMs = 30000;

std::int64_t now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

// Its address tells threads apart.
thread_local char this_thread;

}  // namespace

void WaitNotes::list(int group, int operation, Course& course) {
  const std::lock_guard lock(mutex_);
  courses_.push_back({group, operation, &course});
}

void WaitNotes::unlist(const Course& course) {
  const std::lock_guard lock(mutex_);
  std::erase_if(courses_, [&](const Listed& listed) { return listed.course == &course; });
}

void WaitNotes::list_join(int group, Join join) {
  const std::lock_guard lock(mutex_);
  joins_[group] = std::move(join);
}

void WaitNotes::unlist_join(int group) {
  const std::lock_guard lock(mutex_);
  joins_.erase(group);
}

void WaitNotes::note_thread() const noexcept {
  const void* only = thread_.load(std::memory_order_relaxed);
  if (only == &this_thread) return;
  if (only != nullptr || !thread_.compare_exchange_strong(only, &this_thread)) {
    several_threads_.store(true, std::memory_order_relaxed);
  }
}

Course* WaitNotes::find(int group, int operation) const {
  const auto found = std::ranges::find_if(courses_, [&](const Listed& listed) {
    return listed.group == group && (listed.operation < 0 || listed.operation == operation);
  });
  return found != courses_.end() ? found->course : nullptr;
}

bool WaitNotes::has_come(const WaitNote& theirs) {
  if (theirs.operation < 0) return theirs.group >= 0 || mesh_.rounds_begun() > theirs.epoch;
  bool come = true;
  with_course(theirs.group, theirs.operation, [&](const Course& course) {
    come = course.has_come(static_cast<xd_phase>(theirs.phase), theirs.epoch);
  });
  return come;
}

bool WaitNotes::can_join(const WaitNote& theirs) {
  bool can = false;
  with_course(theirs.group, theirs.operation, [&](const Course& course) {
    can = joins_.contains(theirs.group) &&
          course.can_join(static_cast<xd_phase>(theirs.phase), theirs.epoch);
  });
  return can;
}

// The turn waits for its peers, so it holds no lock.
void WaitNotes::join(const OutOfStep& what, const char* text) {
  Join join;
  {
    const std::lock_guard lock(mutex_);
    const auto found = joins_.find(what.group);
    if (found != joins_.end()) join = found->second;
  }
  if (!join) return;
  joining_.store(true, std::memory_order_relaxed);
  try {
    join(what.operation, text);
  } catch (...) {
    joining_.store(false, std::memory_order_relaxed);
    throw;
  }
  joining_.store(false, std::memory_order_relaxed);
}

void WaitNotes::tell(WaitNote note) {
  note.seen_ms = now_ms();
  note.several_threads = several_threads() ? 1 : 0;
  const std::lock_guard lock(mutex_);
  boards_[at(hosts_.self())].note().write(note);
  if (hosts_.all_are_near()) return;
  if (note.id != told_.id) told_since_ms_ = note.seen_ms;
  const bool same = note.id == told_.id && note.peer == told_.peer &&
                    note.confirms == told_.confirms && note.joins == told_.joins &&
                    note.several_threads == told_.several_threads;
  if (same && note.seen_ms - told_.seen_ms < told_.pause_ms) return;
  note.pause_ms = static_cast<std::int32_t>(
      std::clamp((note.seen_ms - told_since_ms_) / 8, kShortestPauseMs, kLongestPauseMs));
  told_ = note;
  mesh_.send_report(std::as_bytes(std::span(&note, 1)));
}

void WaitNotes::end(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const RankBoard& own = boards_[at(hosts_.self())];
  if (own.note().read().id != id) return;  // another thread's wait has come since
  const WaitNote none;
  own.note().write(none);
  if (told_.id == 0) return;
  told_ = none;
  mesh_.send_report(std::as_bytes(std::span(&none, 1)));
}

void WaitNotes::take(int rank, const WaitNote& note) {
  const std::lock_guard lock(mutex_);
  remote_[at(rank)] = {note, now_ms()};
}

// A note may be damaged, so it names no rank that does not exist.
WaitNote WaitNotes::of(int rank) const {
  WaitNote note;
  bool is_old = false;
  if (const auto near = hosts_.find_near(rank)) {
    note = boards_[at(*near)].note().read();
    is_old = now_ms() - note.seen_ms >= kOldMs;
  } else {
    const std::lock_guard lock(mutex_);
    note = remote_[at(rank)].note;
    is_old = now_ms() - remote_[at(rank)].came_ms >= note.pause_ms + kOldMs;
  }
  const bool exists = note.peer >= -1 && note.peer < static_cast<int>(remote_.size());
  return is_old || !exists ? WaitNote{} : note;
}

}  // namespace xd
