#include "meet/meeting_client.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "meet/handshake.h"

namespace xd {
namespace {

constexpr int kFirstPauseMs = 10;
constexpr int kLongestPauseMs = 200;
constexpr std::size_t kToldObstacles = 3;

// Feeds `reader` until its frame is complete or reading fails.
Io read_what_it_wants(int fd, FrameReader& reader, const Deadline& deadline) {
  std::array<std::byte, 65536> buffer;
  while (reader.wanted() != 0) {
    const auto room = std::span(buffer).first(std::min(reader.wanted(), buffer.size()));
    std::size_t count = 0;
    if (!receive_some(fd, room, count)) return Io::closed;
    reader.receive(room.first(count));
    if (count == 0 && wait_readable(fd, deadline) == Io::timed_out) return Io::timed_out;
  }
  return Io::done;
}

}  // namespace

MeetingSearch::MeetingSearch(std::span<const TcpAddress> addresses, const Key& key,
                             Certainty certainty)
    : key_(key), certainty_(certainty) {
  for (const TcpAddress& address : addresses) doors_.emplace_back(address);
}

std::optional<UniqueFd> MeetingSearch::enter(const Deadline& deadline) {
  std::vector<bool> ready(doors_.size());
  Interruption interruption;
  while (true) {
    for (std::size_t i = 0; i < doors_.size(); ++i) {
      Door& door = doors_[i];
      if (!door.fd && door.again.passed()) knock(door);
      if (!door.fd || !ready[i] || !proceed(door)) continue;
      entered_ = i;
      door.talk.reset();
      return std::move(door.fd);
    }
    if (deadline.passed()) return std::nullopt;
    interruption.check();
    wait(interruption.next(deadline), ready);
  }
}

void MeetingSearch::ended(const std::string& why) {
  leave(doors_[entered_], Telling::stranger, why);
}

void MeetingSearch::wait(const Deadline& deadline, std::vector<bool>& ready) const {
  auto wake = deadline.when();
  std::vector<pollfd> items;
  for (const Door& door : doors_) {
    if (!door.fd) wake = std::min(wake, door.again.when());
    items.push_back({door.fd.get(), static_cast<short>(door.talk ? POLLIN : POLLOUT), 0});
  }
  if (::poll(items.data(), items.size(), Deadline(wake).remaining_ms()) < 0 && errno != EINTR)
    fail_errno("poll", errno);
  for (std::size_t i = 0; i < items.size(); ++i) ready[i] = items[i].revents != 0;
}

void MeetingSearch::knock(Door& door) {
  door.fd = tcp_begin_connect(door.address);
  if (door.fd) return;
  const int error = errno;
  const bool exhausted = error == EMFILE || error == ENFILE;
  const bool waits =
      std::any_of(doors_.begin(), doors_.end(), [](const Door& d) { return !!d.fd; });
  if (exhausted && !waits) fail_errno("socket", error);
  leave(door, Telling::refused_connection,
        concat("connect to ", door.address.text(), ": ", std::strerror(error), " (errno ", error,
               ")"));
}

// True once both ends have proved the secret.
bool MeetingSearch::proceed(Door& door) {
  if (!door.talk) {
    if (const int error = connect_error(door.fd.get()); error != 0) {
      leave(door, Telling::refused_connection,
            concat("connect to ", door.address.text(), ": ", std::strerror(error), " (errno ",
                   error, ")"));
      return false;
    }
    door.talk.emplace(Side::client, key_);
  }
  std::array<std::byte, sizeof(Hello)> buffer;
  bool open = true;
  for (std::size_t count = 1; open && count > 0 && door.talk->wanted() != 0;) {
    // The output is at most a hello and a proof, which fit into the buffer of an idle connection.
    const Bytes output = door.talk->take_output();
    std::size_t sent = 0;
    open = output.empty() || (send_some(door.fd.get(), output, sent) && sent == output.size());
    const auto room = std::span(buffer).first(door.talk->wanted());
    open = open && receive_some(door.fd.get(), room, count);
    if (open) door.talk->receive(room.first(count));
  }
  if (door.talk->proven()) return true;
  if (door.talk->refusal() != Refusal::none) {
    refused(door);
  } else if (!open) {
    // The connection ended without a verdict: the meeting point had no room, or was ending.
    leave(door, Telling::stranger,
          concat(door.address.text(), " closed the connection without an answer"));
  }
  return false;
}

void MeetingSearch::refused(Door& door) {
  const Refusal refusal = door.talk->refusal();
  const std::string text =
      concat("what listens at ", door.address.text(), " ", door.talk->refusal_text());
  if (certainty_ == Certainty::sure) fail(XD_ERROR_MISMATCH, text);
  const bool told = door.telling == Telling::verdict;
  const bool verdict = refusal == Refusal::denied || refusal == Refusal::version;
  // A refusal does not end the search, since any process may listen there and refuse. But the user
  // should not have to wait for the timeout to hear of it.
  if (verdict && !told) log_warning(text);
  leave(door, verdict ? Telling::verdict : Telling::stranger, text);
}

void MeetingSearch::leave(Door& door, Telling telling, const std::string& obstacle) {
  if (certainty_ == Certainty::sure && telling == Telling::refused_connection)
    fail(XD_ERROR_SYSTEM, obstacle,
         ": the process of its unique id has ended, or another communicator has used the id, which "
         "is good for one");
  if (telling >= door.telling) {
    door.telling = telling;
    door.obstacle = obstacle;
  }
  door.talk.reset();
  door.fd.reset();
  door.pause_ms = std::clamp(2 * door.pause_ms, kFirstPauseMs, kLongestPauseMs);
  door.again = Deadline::after_ms(door.pause_ms);
}

std::string MeetingSearch::obstacles() const {
  std::vector<std::pair<Telling, std::string>> met;
  for (const Door& door : doors_) {
    // The connection was held to the end, in vain.
    if (door.fd && door.telling < Telling::verdict)
      met.emplace_back(Telling::stranger, concat(door.address.text(), " did not answer"));
    else if (door.telling != Telling::nothing)
      met.emplace_back(door.telling, door.obstacle);
  }
  std::stable_sort(met.begin(), met.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::string text;
  for (std::size_t i = 0; i < met.size() && i < kToldObstacles; ++i) {
    if (met[i].first < met[0].first) break;
    text += (i == 0 ? "" : "; ") + met[i].second;
  }
  return text;
}

UniqueFd enter_meeting(const TcpAddress& address, const Key& key, const Deadline& deadline) {
  MeetingSearch search({&address, 1}, key, MeetingSearch::Certainty::sure);
  if (auto entered = search.enter(deadline)) return std::move(*entered);
  fail(XD_ERROR_TIMEOUT, "no way into the meeting in time: ", search.obstacles());
}

std::vector<Bytes> join_meeting(UniqueFd connection, const JoinRequest& request,
                                const Deadline& deadline) {
  const TcpAddress here = local_address(connection.get());
  const JoinMessage join{request.rank, request.num_ranks, deadline.remaining_ms(),
                         request.make(&here)};
  // Once this rank has joined, the others rely on it, so it takes the memory for the answer first.
  FrameReader reader(max_answer_bytes(request.num_ranks));
  reader.reserve(answer_bytes(request.num_ranks, join.blob.size()));
  AnswerMessage answer;
  answer.blobs.assign(static_cast<std::size_t>(request.num_ranks), join.blob);
  Io end = send_all(connection.get(), make_frame(encode(join)), deadline);
  if (end == Io::done) end = read_what_it_wants(connection.get(), reader, deadline);
  if (end == Io::timed_out)
    fail(XD_ERROR_TIMEOUT, "the meeting point did not answer rank ", request.rank, " in time");
  if (end == Io::closed)
    throw MeetingGone(XD_ERROR_MISMATCH,
                      concat("the meeting point closed its connection to rank ", request.rank,
                             ": the process that serves it has ended"));
  if (!reader.complete() || !decode_answer_into(answer, reader.payload(), request.num_ranks))
    fail(XD_ERROR_MISMATCH, "the meeting point gave rank ", request.rank, " an invalid answer ",
         reader.refusal_text());
  if (answer.status != XD_SUCCESS) throw Error(answer.status, std::move(answer.text));
  return std::move(answer.blobs);
}

}  // namespace xd
