// A rank's door, at which a new process asks to be let into the place of a rank that has ended, and
// the watch over those that were let in.
//
// The new process takes over what its predecessor has shared: control segment, symmetric memory,
// memory of groups. These outlive a process as long as others have them mapped, and the ranks keep
// their descriptors. So nothing changes in the memory of the other ranks, whatever they do
// meanwhile: a place that another process has taken is to them a rank that has been away.
//
//   new process                                 rank r, for each r that lives, by ascending rank
//   handshake (meet/handshake.h)            ->  proves the secret of the doors
//   claim place p                           ->  waits until p's process has ended, r knows that it
//                                               is lost and has agreed on a view without it, and
//                                               no other process is being let in here; masks p in
//                                               all groups, holds p
//   takes the memory over; opens its door
//   ready                                   ->  p is here: r watches connection and process
//
// All claim by ascending rank, so of two processes one has all ranks, and the other one waits at
// the first. A process that goes away without a word before it is ready may still write, so p is
// free again when that process has ended.
//
// One thread does all that. It is there in communicators that ask for it, never touches an
// operation's memory, and ends with the communicator.
#pragma once

#include <crossdock/comm.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/poll_list.h"
#include "comm/join/messages.h"
#include "comm/join/place.h"
#include "meet/handshake.h"
#include "meet/packet.h"

namespace xd {

class Comm;
class Segment;

class Door {
 public:
  // Listens, and tells the other ranks where. `comm` outlives the object.
  Door(Comm& comm, const Secret& secret);
  ~Door();  // says goodbye to the ranks that were let in, and ends the thread
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  void open();  // starts the thread
  const Secret& secret() const { return secret_; }
  xd_unique_id invite() const;

 private:
  // A process that has come to the door.
  struct Caller {
    enum class State { greets, asks, waits, holds, is_in };

    UniqueFd fd;     // none: it has gone
    UniqueFd pidfd;  // none: the system has no such descriptors
    std::int64_t pid;
    Handshake handshake;
    Deadline limit;  // of its handshake, and of its claim
    State state = State::greets;
    int place = -1;          // the rank that it claims, holds or has
    bool is_late = false;    // it had held the place for too long, and has yet to give it back
    bool gave_back = false;  // it uses nothing of its place any more
    bool has_left = false;   // said goodbye, or lost: it was told
    bool has_ended = false;  // its process
    bool is_over = false;    // to be taken off the list

    void forget() {
      fd.reset();
      pidfd.reset();
      is_over = true;
    }
  };
  using Callers = std::vector<std::unique_ptr<Caller>>;

  void run() noexcept;
  void wait_and_serve();
  void accept();
  void attend(Caller& caller, bool calls, bool has_ended);
  void serve(Caller& caller);
  void greet(Caller& caller, std::span<const std::byte> bytes);
  void answer(Caller& caller, std::span<const std::byte> packet);
  void hear(Caller& caller, std::span<const std::byte> packet);
  void reply(Caller& caller, const Question& question, std::span<const std::byte> more);
  Reply enter(const Question& question) const;
  void claim(Caller& caller, const Question& question);
  void grant();
  void hold(Caller& caller);
  void let_in(Caller& caller);
  void hang_up(Caller& caller);
  void give_up(Caller& caller);
  void on_process_end(Caller& caller);
  bool may_hold(const Caller& caller) const;
  bool has_ended(int place) const;
  bool has_limit(const Caller& caller) const;
  void require_ended(int place) const;
  const Caller* holder_of(int place) const;
  int free_place() const;

  void say(Caller& caller, const Reply& reply, std::span<const std::byte> more = {},
           int passed = -1);
  void refuse(Caller& caller, const Error& error);
  static std::shared_ptr<Segment> shared(const std::vector<std::shared_ptr<Segment>>& of_rank,
                                         int rank);
  void pass(Caller& caller, const std::shared_ptr<Segment>& segment);

  Comm& comm_;
  const Secret secret_;
  UniqueFd wake_, listener_;
  DoorCard card_;
  Callers callers_;  // in the order in which they have come; those that were let in among them
  Deadline accept_again_ = Deadline::after_ms(0);
  Bytes buffer_;
  std::atomic<bool> leaving_{false};
  std::thread thread_;
};

}  // namespace xd
