// The meeting point: collects one blob of every rank, gives all of them to all.
//
// One thread serves one meeting. Every guest that connects has a few seconds to prove the secret
// and name its rank; a connection that is silent, slow or sends nonsense is closed, and the others
// do not notice. Strangers never keep a rank waiting: every connection is accepted at once, and
// where there are too many strangers the one that has been silent for longest is closed. A rank
// that has joined and closes its connection has left, and its place is free again. Ranks that have
// proved the secret and disagree about num_ranks end the meeting, and all of them are told.
#pragma once

#include <crossdock/comm.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/tcp.h"
#include "base/warning_limit.h"
#include "meet/handshake.h"
#include "meet/messages.h"

namespace xd {

struct MeetingOptions {
  Key key;
  Deadline deadline;  // the meeting gives up then, even with ranks present
  // True where connections for other meetings are normal (ports found by trying): they are logged
  // on request only (XD_LOG=comm), and not as warnings.
  bool expects_strangers = false;
  int stop_fd = -1;           // the meeting ends when it becomes readable
  int guest_limit_ms = 5000;  // for a guest to join, and to take the answer
};

class Meeting {
 public:
  // The most connections that have not proved the secret; fewer where the process may have few
  // descriptors.
  static constexpr std::size_t kMaxStrangers = 128;

  // `listener` is a listening, non-blocking socket.
  Meeting(UniqueFd listener, MeetingOptions options);

  // Serves until all ranks have their answer, or until time is over and the ranks present know
  // which ones are missing. Never throws: an error that ends it early is logged, and told to the
  // ranks present.
  void run() noexcept;

 private:
  // One connection. It goes through the handshake, sends its JoinMessage, and is then seated until
  // it is answered.
  struct Guest {
    Guest(UniqueFd fd, const TcpAddress& from, const MeetingOptions& options);

    UniqueFd fd;
    std::string host, name;  // address; with the port, for texts
    Handshake handshake;
    FrameReader join{max_join_bytes()};
    Deadline limit;
    bool seated = false;
    bool answered = false;  // `output` ends with the answer: close when it is sent
    JoinMessage message;
    Bytes output;

    bool is_stranger() const { return !handshake.proven(); }
    bool closed() const { return !fd; }
  };

  void collect();
  void answer_all();
  void give_up() noexcept;
  bool complete() const { return verdict_ || (num_ranks_ > 0 && num_seated() == num_ranks_); }
  int num_seated() const;
  Deadline end_of_waiting() const;
  bool wait_and_serve(const Deadline& until);

  void accept_guests();
  std::size_t num_strangers() const;
  bool evict_stranger();
  void read(Guest& guest);
  void advance(Guest& guest);
  void seat(Guest& guest);
  bool make_way(Guest& newcomer, const JoinMessage& wish);
  void answer(Guest& guest, const AnswerMessage& message);
  void give(Guest& guest, std::span<const std::byte> frame);
  void flush(Guest& guest);
  static void leave(Guest& guest);
  // Whose refusals those are that waiting ranks are told of; the surest ranks first.
  enum class Refused { rank, wrong_secret, other_version };
  static constexpr int kKindsRefused = 3;
  struct RefusedOne {
    std::string host, text;
  };
  bool remember(Refused kind, const Guest& guest, const std::string& text);
  void refuse(Guest& guest, const std::string& reason, bool is_normal_here);
  void close_overdue_guests();
  AnswerMessage result() const;

  UniqueFd listener_;
  MeetingOptions options_;
  std::size_t max_strangers_;
  int num_ranks_ = 0;  // the number that all seated guests have named
  bool stopped_ = false;
  std::optional<AnswerMessage> verdict_;  // the reason why this meeting cannot succeed any more
  Deadline accept_again_;
  std::vector<std::unique_ptr<Guest>> guests_;
  Bytes failure_;  // the answer to all if memory runs out, made while there was some
  std::array<std::vector<RefusedOne>, kKindsRefused> refused_;
  WarningLimit warnings_{"connections refused at the meeting point"};
};

}  // namespace xd
