// Each rank tells all others about its long waits, where and for whom, and knows how far it has
// come itself.
//
// Two ranks that wait for one another, each for something to which the other has not come, would
// wait for ever: see docs/internals/communicator.md for how they find out that it is so.
#pragma once

#include <crossdock/comm.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "comm/fatal.h"
#include "comm/hosts.h"
#include "comm/wait_note.h"
#include "meet/mesh.h"

namespace xd {

// How far this rank has come in a sequence of operations, or in a pipeline of it. Its methods are
// called by a thread of this rank that waits.
class Course {
 public:
  // True if this rank has done what a peer waits for in that phase of that operation, or is at it.
  virtual bool has_come(xd_phase phase, std::uint64_t epoch) const = 0;
  // True if the wait ends when this rank takes its next turn, with a failure.
  virtual bool can_join(xd_phase phase, std::uint64_t epoch) const = 0;
  virtual std::string detail() const = 0;  // the sequence's sizes
  virtual void show_wait(int peer) = 0;    // for people who look; -1 = the wait is over

 protected:
  ~Course() = default;
};

// An operation in which ranks wait while others are in a host call.
struct OutOfStep {
  std::int32_t group, operation;
  std::uint64_t epoch;
};

class WaitNotes {
 public:
  // All outlive the object. `boards`: of the near ranks, by rank.
  WaitNotes(const HostMap& hosts, Mesh& mesh, const std::vector<RankBoard>& boards)
      : hosts_(hosts), mesh_(mesh), boards_(boards), remote_(hosts.host_of().size()) {}

  // ---- Calls of this rank ----

  // `operation`: -1 = all of the group.
  void list(int group, int operation, Course& course);
  void unlist(const Course& course);
  // join(operation, text) takes this rank's turn in a group with a failure, and throws it.
  using Join = std::function<void(std::int32_t operation, const char* text)>;
  void list_join(int group, Join join);
  void unlist_join(int group);
  // fail(what, round, text, deadline) is this rank's part of the host call that its peers are in.
  // It is a wait within the operation's, and ends by the same deadline.
  using FailRound = std::function<void(const OutOfStep& what, std::uint64_t round,
                                       const std::string& text, std::optional<Deadline> deadline)>;
  void set_fail_round(FailRound fail) { fail_round_ = std::move(fail); }
  void fail_round(const OutOfStep& what, std::uint64_t round, const std::string& text,
                  std::optional<Deadline> deadline) const {
    fail_round_(what, round, text, deadline);
  }
  // A thread makes a call on the communicator.
  void note_thread() const noexcept;
  bool several_threads() const { return several_threads_.load(std::memory_order_relaxed); }
  // True if this rank has come to what a peer waits for, or does not know.
  bool has_come(const WaitNote& theirs);
  // True if a peer's wait in an operation ends when this rank joins it.
  bool can_join(const WaitNote& theirs);
  void join(const OutOfStep& what, const char* text);
  bool is_joining() const { return joining_.load(std::memory_order_relaxed); }
  // Calls use(course) if the place has one.
  template <class Use>
  void with_course(int group, int operation, Use use) {
    const std::lock_guard lock(mutex_);
    if (Course* course = find(group, operation)) use(*course);
  }

  // ---- This rank's note ----

  std::uint64_t new_id() { return ids_.fetch_add(1, std::memory_order_relaxed) + 1; }
  // The latest of this rank's waits is the one that others see. Remote ranks hear of it when it is
  // new, when it confirms something else, and now and then.
  void tell(WaitNote note);
  void end(std::uint64_t id);

  // ---- Others' notes ----

  // The watch thread brings a remote rank's.
  void take(int rank, const WaitNote& note);
  // The wait that the rank is in; none if it has not looked for a while, as a process that is
  // stopped does not.
  WaitNote of(int rank) const;

 private:
  Course* find(int group, int operation) const;

  struct Listed {
    int group, operation;
    Course* course;
  };
  struct RemoteNote {
    WaitNote note;
    std::int64_t came_ms = 0;
  };

  const HostMap& hosts_;
  Mesh& mesh_;
  const std::vector<RankBoard>& boards_;
  std::atomic<std::uint64_t> ids_{0};
  mutable std::atomic<const void*> thread_{nullptr};  // the only one so far
  mutable std::atomic<bool> several_threads_{false};
  std::atomic<bool> joining_{false};
  mutable std::mutex mutex_;
  std::vector<Listed> courses_;
  std::map<int, Join> joins_;  // by group
  FailRound fail_round_;
  std::vector<RemoteNote> remote_;  // by rank
  WaitNote told_;                   // the note that remote ranks have heard
  std::int64_t told_since_ms_ = 0;
};

}  // namespace xd
