// One rank's part in a sequence of operations, as it is seen by people who look: its counters, and
// a name. The sequence's owner tells it what goes on.
#pragma once

#include <crossdock/status.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "comm/operations.h"
#include "observe/profiler.h"
#include "observe/stats_segment.h"
#include "observe/trace.h"

namespace xd::observe {

class Subject {
 public:
  // `operations` are the sequence's.
  Subject(const Identity& identity, const Operations& operations, std::string_view comm);
  // With XD_LOG=stats, prints its numbers.
  ~Subject();
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;

  Counters& counters() const { return place_.counters(); }
  std::span<Number> waits() const {
    return {counters().waits(), static_cast<std::size_t>(counters().identity.num_ranks)};
  }
  const Operations& operations() const { return operations_; }
  // By rank; of the operation that is under way.
  std::vector<char>& seen() { return seen_; }
  // The kind and sizes of the sequence.
  void describe(std::string_view detail) {
    counters().detail.set(detail);
    set_title();
  }
  void set_name(std::string_view name) {
    counters().name.set(name);
    set_title();
  }
  const Track& track() const { return track_; }
  // A second line of the trace, for what runs on a device. Called before there are operations.
  void add_device_line() {
    device_track_ = Track(counters().identity);
    set_title();
  }
  const Track& device_track() const { return device_track_; }

 private:
  void log() const noexcept;
  void set_title() const noexcept;

  const Operations& operations_;
  const Place place_;
  std::vector<char> seen_;
  const Track track_;
  Track device_track_;
};

// A part of an operation, from here to the end of the scope, in the trace.
class Span {
 public:
  Span(const Subject& subject, const char* name)
      : track_(subject.track()), name_(name), begun_(track_.on() ? now_ns() : 0) {}
  ~Span() {
    if (track_.on()) track_.span(name_, begun_, now_ns(), nullptr);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  const Track& track_;
  const char* const name_;
  const std::uint64_t begun_;
};

// A call of the C API into a subject, from its beginning to end().
class Call {
 public:
  // A call of another number than the subject's operations have is not counted.
  Call(const char* function, Subject& subject, std::int32_t operation)
      : range_(function, subject.counters().name),
        subject_(subject),
        operation_(operation),
        counts_(subject.operations().contains(operation)) {
    if (!counts_) return;
    Counters& counters = subject_.counters();
    begun_ = now_ns();
    counters.since.set(begun_);
    counters.operation.set(index() + 1);
  }
  xd_status end(xd_status status) {
    if (!counts_) return status;
    Counters& counters = subject_.counters();
    counters.operation.set(0);
    counters.calls[index()].add(1);
    const std::uint64_t ended = now_ns();
    counters.call_ns[index()].add(ended - begun_);
    if (status != XD_SUCCESS) counters.failed_calls.add(1);
    if (subject_.track().on()) {
      const char* const failed = status != XD_SUCCESS ? status_name(status) : nullptr;
      subject_.track().span(subject_.operations().name(operation_), begun_, ended, failed);
    }
    return status;
  }

 private:
  std::size_t index() const {
    return static_cast<std::size_t>(operation_ - subject_.operations().first);
  }

  const ProfilerRange range_;
  Subject& subject_;
  const std::int32_t operation_;
  const bool counts_;
  std::uint64_t begun_ = 0;
};

// Measures how long a rank that has begun to wait for its peers waits for each of them.
class WaitTimes {
 public:
  // `of_caller`, by rank, or null: gets what is measured as well. Then it measures from now on, and
  // otherwise from when a peer is found to be late.
  explicit WaitTimes(Subject& subject, std::int64_t* of_caller = nullptr);
  ~WaitTimes() {
    if (waits_for_ >= 0) subject_.counters().waits_for.set(0);
  }
  WaitTimes(const WaitTimes&) = delete;
  WaitTimes& operator=(const WaitTimes&) = delete;

  const Subject& subject() const { return subject_; }
  // Called each time that this rank looks whether `peer` is `here`: looks which of all `peers` have
  // come since the last look.
  template <class Peers, class IsHere>
  void look(int peer, bool here, const Peers& peers, IsHere&& is_here) {
    if (here && begun_ == 0) return;
    const std::uint64_t now = now_ns();
    const bool begins = begun_ == 0;
    if (begins) begun_ = now;
    if (!here && waits_for_ != peer) wait_for(peer);
    for (const auto& other : peers) {
      char& seen = subject_.seen()[static_cast<std::size_t>(int{other})];
      if (seen != 0 || !is_here(other)) continue;
      seen = 1;
      if (!begins) add(other, now - begun_);
    }
  }

 private:
  void wait_for(int peer);
  void add(int peer, std::uint64_t ns);

  Subject& subject_;
  std::int64_t* const of_caller_;
  std::uint64_t begun_ = 0;
  int waits_for_ = -1;
};

}  // namespace xd::observe
