// A rank's side of a meeting.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"
#include "bootstrap/meeting_messages.h"
#include "bootstrap/secret.h"
#include "bootstrap/tcp.h"

namespace xd {

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
  std::span<const std::byte> blob;
};

// Waits for the answer. Throws the error that the meeting point answers (TIMEOUT, MISMATCH),
// MeetingGone, or TIMEOUT if no answer comes.
std::vector<Bytes> join_meeting(UniqueFd connection, const JoinRequest& request,
                                const Deadline& deadline);

}  // namespace xd
