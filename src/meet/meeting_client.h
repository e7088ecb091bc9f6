// A rank's side of a meeting: how it gets in, and what it says there.
//
// To get in, a rank connects to every address where the meeting may be, at all of them at the same
// time. Where a process answers, the rank keeps the connection: it waits on it up to its deadline,
// and goes on trying the other addresses meanwhile. So it finds a meeting point that is slow, or
// has many strangers before it, and an address that belongs to another program costs no time.
// Addresses that are closed or refuse are tried again, after a pause that grows.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/tcp.h"
#include "meet/bootstrap.h"
#include "meet/handshake.h"
#include "meet/messages.h"

namespace xd {

class MeetingSearch {
 public:
  // sure: the meeting is at the first and only address. Then a refused connection or handshake ends
  // the search; otherwise another program may have refused it.
  enum class Certainty { sure, one_of_several };

  MeetingSearch(std::span<const TcpAddress> addresses, const Key& key, Certainty certainty);

  // A connection on which both ends have proved the secret; may be called again when that has ended
  // for the reason `why`. Returns nothing if the deadline has passed; obstacles() tells what was
  // met. Throws SYSTEM (no descriptors; sure: no process listens) or MISMATCH (sure: another
  // version, another secret, no meeting point).
  std::optional<UniqueFd> enter(const Deadline& deadline);
  void ended(const std::string& why);

  // The obstacle that tells most about the failure.
  std::string obstacles() const;

 private:
  enum class Telling { nothing, refused_connection, stranger, verdict };
  struct Door {
    explicit Door(const TcpAddress& at) : address(at), again(Deadline::after_ms(0)) {}
    TcpAddress address;
    UniqueFd fd;
    std::optional<Handshake> talk;  // set when the connection is established
    Deadline again;                 // without a connection: the time of the next attempt
    int pause_ms = 0;
    Telling telling = Telling::nothing;
    std::string obstacle;
  };

  void knock(Door& door);
  bool proceed(Door& door);
  void refused(Door& door);
  void leave(Door& door, Telling telling, const std::string& obstacle);
  void wait(const Deadline& deadline, std::vector<bool>& ready) const;

  Key key_;
  Certainty certainty_;
  std::vector<Door> doors_;
  std::size_t entered_ = 0;
};

// The meeting point went away after it had let this rank in.
class MeetingGone : public Error {
 public:
  using Error::Error;
};

// Connects to the meeting's only address, and goes through the handshake. Throws SYSTEM (no process
// listens there), MISMATCH (another version, another secret, no meeting point) or TIMEOUT.
UniqueFd enter_meeting(const TcpAddress& address, const Key& key, const Deadline& deadline);

struct JoinRequest {
  int rank;
  int num_ranks;
  const Bootstrap::MakeBlob& make;
};

// Waits for the answer. Throws the error that the meeting point answers (TIMEOUT, MISMATCH),
// MeetingGone, or TIMEOUT if no answer comes.
std::vector<Bytes> join_meeting(UniqueFd connection, const JoinRequest& request,
                                const Deadline& deadline);

}  // namespace xd
