// The meeting point: collects one blob of every rank, gives all of them to all.
//
// One thread serves one meeting. Whoever connects has a few seconds to prove the secret and say who
// it is; a connection that is silent, slow or talks nonsense is closed, and the others do not
// notice. Strangers never keep anybody waiting: whoever knocks is let in at once, and where there
// are too many of them the one who has been silent for longest goes. A rank that has joined and
// closes its connection has left: its place is free again. Ranks that have proved the secret and
// disagree about num_ranks end the meeting: all of them are told.
#pragma once

#include <crossdock/comm.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/warning_limit.h"
#include "bootstrap/handshake.h"
#include "bootstrap/meeting_messages.h"

namespace xd {

struct MeetingOptions {
  Key key;
  Deadline deadline;  // gives up then, whoever is there
  // Connections for other meetings are normal here (ports found by trying): mention them on request
  // only (XD_LOG=comm), not as warnings.
  bool expects_strangers = false;
  int stop_fd = -1;  // ends the waiting when it becomes readable
};

class Meeting {
 public:
  static constexpr int kGuestLimitMs = 5000;  // from connecting to having joined; for an answer
  // Connections that have not proved the secret; fewer where the process may have few descriptors.
  static constexpr std::size_t kMaxStrangers = 128;

  // `listener` listens, and is non-blocking.
  Meeting(UniqueFd listener, MeetingOptions options);

  // Serves until all ranks have their answer, or the waiting has ended and those present know who
  // is missing. Never throws: what ends it early is logged, and told to those present.
  void run() noexcept;

 private:
  // One connection. Steps: handshake, then its JoinMessage, then seated until it is answered.
  struct Guest {
    Guest(UniqueFd fd, std::string name, const Key& key);

    UniqueFd fd;
    std::string name;  // address and port, for texts
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
  static void give(Guest& guest, std::span<const std::byte> frame);
  void flush(Guest& guest);
  static void leave(Guest& guest);
  void remember(const std::string& refusal);
  void refuse(Guest& guest, const std::string& reason, bool is_normal_here);
  void close_overdue_guests();
  AnswerMessage result() const;

  UniqueFd listener_;
  MeetingOptions options_;
  std::size_t max_strangers_;
  int num_ranks_ = 0;  // as all who are seated say
  bool stopped_ = false;
  std::optional<AnswerMessage> verdict_;  // why this meeting cannot succeed any more
  Deadline accept_again_;
  std::vector<std::unique_ptr<Guest>> guests_;
  Bytes failure_;  // the answer to all if there is no memory to go on, made while there was some
  std::vector<std::string> refused_ranks_;  // texts, for the error of those who waited for them
  WarningLimit warnings_{"connections refused at the meeting point"};
};

}  // namespace xd
