#include "bootstrap/meeting_search.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/log.h"

namespace xd {
namespace {

constexpr int kFirstPauseMs = 10;
constexpr int kLongestPauseMs = 200;
constexpr std::size_t kToldObstacles = 3;

}  // namespace

MeetingSearch::MeetingSearch(std::span<const TcpAddress> addresses, const Key& key, Place place)
    : key_(key), place_(place) {
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
  if (place_ == Place::sure) fail(XD_ERROR_MISMATCH, text);
  const bool told = door.telling == Telling::verdict;
  const bool verdict = refusal == Refusal::denied || refusal == Refusal::version;
  // A refusal does not end the search, since any process may listen there and refuse. But the user
  // should not have to wait for the timeout to hear of it.
  if (verdict && !told) log_warning(text);
  leave(door, verdict ? Telling::verdict : Telling::stranger, text);
}

void MeetingSearch::leave(Door& door, Telling telling, const std::string& obstacle) {
  if (place_ == Place::sure && telling == Telling::refused_connection)
    fail(XD_ERROR_SYSTEM, obstacle);
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

}  // namespace xd
