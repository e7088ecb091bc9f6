// A new process at a rank's door (comm/join/door.h): its connection, and what it asks there.
#pragma once

#include <sys/types.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/interrupt.h"
#include "base/wire.h"
#include "comm/join/messages.h"
#include "meet/handshake.h"
#include "memory/host_segment.h"

namespace xd {

class Entrance {
 public:
  // Connects, and proves the secret. `whose`: the rank in words. Throws PEER_LOST if nobody is
  // there any more, MISMATCH, TIMEOUT, ABORTED.
  Entrance(const Tag& door, const Secret& secret, std::string whose, const Deadline& deadline);
  Entrance(Entrance&&) = default;
  ~Entrance();  // withdraws what it has claimed, unless leave_open() was called

  struct Answer {
    Reply reply;
    Bytes more;
    UniqueFd fd;
  };
  // Throws what the rank has refused with. `waits_for`: words for a TIMEOUT.
  Answer ask(const Question& question, std::span<const std::byte> more = {},
             const std::string& waits_for = {});
  // Asks for memory and maps it; null where there is none.
  std::shared_ptr<Segment> ask_memory(const Question& question, const SegmentMaker& maker);

  pid_t pid() const { return pid_; }
  // A second descriptor of the connection.
  UniqueFd duplicate() const;
  // Lets go of it without a word.
  void leave_open() { fd_.reset(); }

 private:
  void prove(const Secret& secret);
  void send(std::span<const std::byte> head, std::span<const std::byte> body = {});
  Answer receive(const std::string& waits_for);
  void wait(short events, const std::string& waits_for);
  [[noreturn]] void fail_gone() const;

  std::string whose_;
  Deadline deadline_;
  Interruption interruption_;
  UniqueFd fd_;
  // The rank's process may have ended, and a fork of it hold its sockets open.
  UniqueFd pidfd_;
  pid_t pid_ = 0;
  bool is_proven_ = false;
  Bytes buffer_;
};

}  // namespace xd
