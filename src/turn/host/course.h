// How far this rank has come in a sequence on the host, for peers that wait for it.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "comm/comm.h"
#include "observe/subject.h"

namespace xd::turn {

class HostCourse final : public Course {
 public:
  using Asks = std::function<bool(xd_phase phase, std::uint64_t epoch)>;

  // `operation`: -1 = all of the sequence. All outlive the object.
  HostCourse(Comm& comm, int number, int operation, observe::Subject& subject, Asks has_come,
             Asks can_join)
      : comm_(comm),
        subject_(subject),
        has_come_(std::move(has_come)),
        can_join_(std::move(can_join)) {
    comm_.errors().notes().list(number, operation, *this);
  }
  ~HostCourse() {
    if (comm_.errors().in_fork()) return;  // a fork's copy of the lock may be held for ever
    comm_.errors().notes().unlist(*this);
  }
  HostCourse(const HostCourse&) = delete;
  HostCourse& operator=(const HostCourse&) = delete;

  bool has_come(xd_phase phase, std::uint64_t epoch) const override {
    return has_come_(phase, epoch);
  }
  bool can_join(xd_phase phase, std::uint64_t epoch) const override {
    return can_join_(phase, epoch);
  }
  std::string detail() const override { return subject_.counters().detail.get().data(); }
  void show_wait(int peer) override {
    subject_.counters().waits_for.set(peer < 0 ? 0 : static_cast<std::uint64_t>(peer) + 1);
  }

 private:
  Comm& comm_;
  observe::Subject& subject_;
  const Asks has_come_, can_join_;
};

}  // namespace xd::turn
