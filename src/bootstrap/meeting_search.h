// How a rank gets into its meeting: it knocks at every address where the meeting may be, at all of
// them at the same time.
//
// Where somebody answers, the rank keeps its place: it waits on that connection up to its deadline,
// and goes on looking elsewhere meanwhile. So a meeting point that is slow, or has many strangers
// before it, is found, and one of the addresses that belongs to somebody else costs no time. What
// is closed or refuses is tried again, after a pause that grows.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "bootstrap/handshake.h"
#include "bootstrap/tcp.h"

namespace xd {

class MeetingSearch {
 public:
  // sure: the meeting is at the first and only address. Then a refused connection or handshake is
  // the end, where otherwise it may be somebody else's.
  enum class Place { sure, one_of_several };

  MeetingSearch(std::span<const TcpAddress> addresses, const Key& key, Place place);

  // A connection on which both ends have proved the secret; may be called again when that has ended
  // for the reason `why`. Nothing if the deadline has passed: obstacles() says what was met.
  // Throws SYSTEM (no descriptors; sure: nobody listens) or MISMATCH (sure: another version,
  // another secret, no meeting point).
  std::optional<UniqueFd> enter(const Deadline& deadline);
  void ended(const std::string& why);

  // What stood in the way, where it told most.
  std::string obstacles() const;

 private:
  enum class Telling { nothing, refused_connection, stranger, verdict };
  struct Door {
    explicit Door(const TcpAddress& at) : address(at), again(Deadline::after_ms(0)) {}
    TcpAddress address;
    UniqueFd fd;
    std::optional<Handshake> talk;  // from when the connection stands
    Deadline again;                 // when to knock next, without a connection
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
  Place place_;
  std::vector<Door> doors_;
  std::size_t entered_ = 0;
};

}  // namespace xd
