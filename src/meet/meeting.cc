#include "meet/meeting.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/error.h"
#include "base/log.h"
#include "base/rank_list.h"
#include "base/tcp.h"

namespace xd {
namespace {

constexpr int kOutOfDescriptorsPauseMs = 50;
// Number of connections that are accepted between two looks at the connected guests.
constexpr int kAcceptBatch = 64;
constexpr std::size_t kMaxRefused = 64;  // of a kind that are remembered
constexpr std::size_t kToldRefused = 4;

// Ranks get their answer shortly before their own timeout, so that they learn the names of the
// missing.
Deadline answer_before(int remaining_ms) {
  return Deadline::after_ms(remaining_ms - std::min(remaining_ms / 4, 250));
}

// Strangers may hold an eighth of the application's descriptors.
std::size_t strangers_allowed() {
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return Meeting::kMaxStrangers;
  return std::clamp<std::size_t>(limit.rlim_cur / 8, 1, Meeting::kMaxStrangers);
}

}  // namespace

Meeting::Guest::Guest(UniqueFd connection, const TcpAddress& from, const MeetingOptions& options)
    : fd(std::move(connection)),
      host(from.host()),
      name(from.text()),
      handshake(Side::server, options.key),
      limit(Deadline::after_ms(options.guest_limit_ms)) {}

Meeting::Meeting(UniqueFd listener, MeetingOptions options)
    : listener_(std::move(listener)),
      options_(options),
      max_strangers_(strangers_allowed()),
      accept_again_(Deadline::Clock::now()),
      failure_(make_frame(
          encode(AnswerMessage{XD_ERROR_MISMATCH,
                               "the meeting point cannot go on: its process is short of memory or "
                               "of another thing that it needs (its log says which)",
                               {}}))) {}

void Meeting::run() noexcept {
  try {
    collect();
    // From here on a rank that comes finds the port closed, and not a meeting that refuses it.
    listener_.reset();
    answer_all();
  } catch (...) {
    give_up();
  }
}

// Called inside a catch block; allocates nothing. Ranks that have joined are told; others find the
// connection, or the port, closed.
void Meeting::give_up() noexcept {
  std::array<char, 1024> text;
  caught(text);
  log_warning("meeting point: ", text.data());
  listener_.reset();
  for (const auto& guest : guests_) {
    std::size_t sent = 0;
    if (guest->seated) send_some(guest->fd.get(), failure_, sent);
  }
}

void Meeting::collect() {
  while (!complete() && !stopped_) {
    const Deadline end = end_of_waiting();
    if (end.passed()) return;
    wait_and_serve(end);
  }
}

void Meeting::answer_all() {
  // No rank gets this answer before there is memory for all of them.
  const Bytes frame = make_frame(encode(result()));
  for (const auto& guest : guests_)
    if (guest->seated) guest->output.reserve(guest->output.size() + frame.size());
  for (const auto& guest : guests_) {
    if (!guest->seated) continue;
    give(*guest, frame);
    flush(*guest);
  }
  for (const auto& guest : guests_) {
    if (!guest->closed() && !guest->answered)
      refuse(*guest, "had not joined when the meeting ended", options_.expects_strangers);
  }
  const Deadline end = Deadline::after_ms(options_.guest_limit_ms);
  while (wait_and_serve(end) && !end.passed()) {
  }
}

int Meeting::num_seated() const {
  return static_cast<int>(
      std::count_if(guests_.begin(), guests_.end(), [](const auto& g) { return g->seated; }));
}

Deadline Meeting::end_of_waiting() const {
  auto end = options_.deadline.when();
  for (const auto& guest : guests_)
    if (guest->seated) end = std::min(end, guest->limit.when());
  return Deadline(end);
}

// Waits for an event and handles it. False = there is no guest left to serve.
bool Meeting::wait_and_serve(const Deadline& until) {
  std::erase_if(guests_, [](const auto& guest) { return guest->closed(); });
  auto wake = until.when();
  std::vector<pollfd> items;
  for (const auto& guest : guests_) {
    if (!guest->seated) wake = std::min(wake, guest->limit.when());
    const bool writes = !guest->output.empty();
    items.push_back({guest->fd.get(), static_cast<short>(writes ? POLLIN | POLLOUT : POLLIN), 0});
  }
  if (listener_) {
    const bool accepts = accept_again_.passed();
    if (!accepts) wake = std::min(wake, accept_again_.when());
    items.push_back({accepts ? listener_.get() : -1, POLLIN, 0});
    items.push_back({options_.stop_fd, POLLIN, 0});
  } else if (guests_.empty()) {
    return false;
  }
  if (::poll(items.data(), items.size(), Deadline(wake).remaining_ms()) < 0 && errno != EINTR)
    fail_errno("poll", errno);

  for (std::size_t i = 0; i < guests_.size(); ++i) {
    Guest& guest = *guests_[i];
    if ((items[i].revents & POLLOUT) != 0) flush(guest);
    if ((items[i].revents & ~POLLOUT) != 0 && !guest.closed()) read(guest);
  }
  if (listener_) {
    stopped_ = items[items.size() - 1].revents != 0;
    if (items[items.size() - 2].revents != 0) accept_guests();
  }
  close_overdue_guests();
  return true;
}

// The system's queue of connections is short, and ranks stand in it behind strangers, so it is
// emptied as fast as possible.
void Meeting::accept_guests() {
  for (int i = 0; i < kAcceptBatch; ++i) {
    TcpAddress peer;
    UniqueFd fd = tcp_accept(listener_.get(), peer);
    if (fd) {
      if (num_strangers() >= max_strangers_) evict_stranger();
      guests_.push_back(std::make_unique<Guest>(std::move(fd), peer, options_));
      read(*guests_.back());  // a rank has already sent its hello
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    // When descriptors or memory run out, the connection stays in the queue, and so does its event.
    const bool exhausted =
        errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (exhausted && !evict_stranger()) {
      accept_again_ = Deadline::after_ms(kOutOfDescriptorsPauseMs);
      return;
    }
  }
}

std::size_t Meeting::num_strangers() const {
  return static_cast<std::size_t>(std::count_if(guests_.begin(), guests_.end(), [](const auto& g) {
    return !g->closed() && g->is_stranger();
  }));
}

// Closes the oldest stranger that has not sent its hello; if all have, the oldest of all. A rank
// has sent its hello when it is accepted and proves the secret a round trip later; if it is closed
// it comes again. False = there is no stranger.
bool Meeting::evict_stranger() {
  Guest* oldest = nullptr;
  for (const auto& guest : guests_) {  // in the order in which they came
    if (guest->closed() || !guest->is_stranger()) continue;
    const bool silent = !guest->handshake.peer_greeted();
    if (oldest == nullptr || silent) oldest = guest.get();
    if (silent) break;
  }
  if (oldest == nullptr) return false;
  refuse(*oldest, "had not proved the secret when its room was needed", false);
  return true;
}

void Meeting::read(Guest& guest) {
  std::array<std::byte, 1024> buffer;
  while (!guest.closed() && !guest.answered) {
    const std::size_t wanted =
        guest.handshake.wanted() != 0 ? guest.handshake.wanted() : guest.join.wanted();
    // A seated guest sends nothing more. One byte is read to notice a guest that does.
    const std::size_t room = std::clamp<std::size_t>(wanted, 1, buffer.size());
    std::size_t count = 0;
    if (!receive_some(guest.fd.get(), std::span(buffer).first(room), count)) {
      if (guest.seated) return leave(guest);
      return refuse(guest, "closed the connection before it had joined",
                    options_.expects_strangers);
    }
    if (count == 0) return;
    if (guest.seated) return refuse(guest, "spoke after it had joined", false);
    const auto bytes = std::span<const std::byte>(buffer).first(count);
    if (guest.handshake.wanted() != 0)
      guest.handshake.receive(bytes);
    else
      guest.join.receive(bytes);
    advance(guest);
  }
  // Bytes that an answered guest still sends are thrown away, until it closes.
  std::size_t count = 0;
  if (!guest.closed() && !receive_some(guest.fd.get(), std::span(buffer), count)) guest.fd.reset();
}

void Meeting::leave(Guest& guest) {
  guest.seated = false;
  guest.fd.reset();
}

void Meeting::advance(Guest& guest) {
  const Bytes output = guest.handshake.take_output();
  guest.output.insert(guest.output.end(), output.begin(), output.end());
  flush(guest);
  if (guest.closed()) return;
  if (const Refusal refusal = guest.handshake.refusal(); refusal != Refusal::none) {
    const std::string& reason = guest.handshake.refusal_text();
    // A rank that is refused comes again and again.
    bool is_old = refusal == Refusal::other_meeting && options_.expects_strangers;
    const std::string text = concat(guest.name, ", which ", reason);
    if (refusal == Refusal::wrong_proof) is_old = !remember(Refused::wrong_secret, guest, text);
    if (refusal == Refusal::version) is_old = !remember(Refused::other_version, guest, text);
    return refuse(guest, reason, is_old);
  }
  if (!guest.join.refusal_text().empty()) return refuse(guest, guest.join.refusal_text(), false);
  if (guest.join.complete()) seat(guest);
}

void Meeting::seat(Guest& guest) {
  const auto wish = decode_join(guest.join.payload());
  if (!wish) return refuse(guest, "sent no valid request to join", false);
  if (!make_way(guest, *wish)) return;
  num_ranks_ = wish->num_ranks;
  guest.message = *wish;
  guest.seated = true;
  guest.limit = answer_before(wish->remaining_ms);
}

// False = the newcomer cannot have the rank it wants, and has been told so.
bool Meeting::make_way(Guest& newcomer, const JoinMessage& wish) {
  const auto turn_away = [&](const std::string& reason) {
    const std::string text = concat("rank ", wish.rank, " (", newcomer.name, ") ", reason);
    const AnswerMessage refusal{XD_ERROR_MISMATCH, text, {}};
    remember(Refused::rank, newcomer, text);
    if (wish.num_ranks != num_ranks_) verdict_ = refusal;
    answer(newcomer, refusal);
    return false;
  };
  for (const auto& other : guests_) {
    if (!other->seated) continue;
    const bool other_size = other->message.num_ranks != wish.num_ranks;
    // The new connection of a rank that gave up and tries again may be seen before the end of its
    // first one.
    if (other_size || other->message.rank == wish.rank) read(*other);
    if (!other->seated) continue;
    if (other_size)
      return turn_away(concat("has num_ranks = ", wish.num_ranks, ", expected ", num_ranks_,
                              " as rank ", other->message.rank, " (", other->name, ") has"));
    if (other->message.rank == wish.rank)
      return turn_away(concat("has come twice: ", other->name, " has joined as this rank already"));
    if (other->message.blob.size() != wish.blob.size())
      return turn_away(concat("brings ", wish.blob.size(), " bytes, expected ",
                              other->message.blob.size(), " as rank ", other->message.rank));
  }
  return true;
}

void Meeting::answer(Guest& guest, const AnswerMessage& message) {
  give(guest, make_frame(encode(message)));
  flush(guest);
}

void Meeting::give(Guest& guest, std::span<const std::byte> frame) {
  guest.output.insert(guest.output.end(), frame.begin(), frame.end());
  guest.seated = false;
  guest.answered = true;
  guest.limit = Deadline::after_ms(options_.guest_limit_ms);
}

void Meeting::flush(Guest& guest) {
  if (guest.output.empty()) return;
  std::size_t count = 0;
  const bool open = send_some(guest.fd.get(), guest.output, count);
  guest.output.erase(guest.output.begin(),
                     guest.output.begin() + static_cast<std::ptrdiff_t>(count));
  if (!open || (guest.answered && guest.output.empty())) leave(guest);
}

void Meeting::refuse(Guest& guest, const std::string& reason, bool is_normal_here) {
  const std::string text = concat("refused ", guest.name, " at the meeting point: it ", reason);
  if (is_normal_here)
    log_topic("comm", text);
  else
    warnings_.warn(text);
  leave(guest);
}

// False = the host has been refused for the same reason before.
bool Meeting::remember(Refused kind, const Guest& guest, const std::string& text) {
  auto& refused = refused_[static_cast<std::size_t>(kind)];
  if (kind != Refused::rank &&
      std::ranges::find(refused, guest.host, &RefusedOne::host) != refused.end())
    return false;
  if (refused.size() < kMaxRefused) refused.push_back({guest.host, text});
  return true;
}

void Meeting::close_overdue_guests() {
  for (const auto& guest : guests_) {
    if (guest->closed() || guest->seated || !guest->limit.passed()) continue;
    refuse(*guest, guest->answered ? "did not take its answer in time" : "was silent for too long",
           false);
  }
}

AnswerMessage Meeting::result() const {
  if (verdict_) return *verdict_;
  AnswerMessage message;
  message.blobs.resize(static_cast<std::size_t>(num_ranks_));
  std::vector<bool> present(message.blobs.size());
  for (const auto& guest : guests_) {
    if (!guest->seated) continue;
    const auto rank = static_cast<std::size_t>(guest->message.rank);
    message.blobs[rank] = guest->message.blob;
    present[rank] = true;
  }
  std::vector<int> missing;
  for (int r = 0; r < num_ranks_; ++r)
    if (!present[static_cast<std::size_t>(r)]) missing.push_back(r);
  if (missing.empty()) return message;
  std::string text = concat(rank_list(missing), " of ", num_ranks_, " did not come in time");
  std::size_t told = 0;
  for (const auto& kind : refused_)
    for (const RefusedOne& one : kind)
      if (told++ < kToldRefused) text += "; refused: " + one.text;
  return {XD_ERROR_TIMEOUT, text, {}};
}

}  // namespace xd
