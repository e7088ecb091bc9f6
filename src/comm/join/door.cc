#include "comm/join/door.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/math.h"
#include "base/pidfd.h"
#include "base/thread.h"
#include "comm/comm.h"
#include "comm/control.h"
#include "meet/invitation.h"
#include "memory/segment.h"

namespace xd {
namespace {

constexpr int kGreetingMs = 5000;    // for a caller to prove the secret
constexpr int kLookMs = 10;          // between looks at what a claim waits for
constexpr int kGoodbyeMs = 1000;     // for ranks that have not read earlier messages
constexpr int kAcceptPauseMs = 50;   // this process has no descriptor or memory for a connection
constexpr int kPatienceMs = 1000;    // behind the end of a claim, which its process may see first
constexpr int kMostCallers = 16;     // not counting those that were let in
constexpr std::size_t kRoom = 4096;  // for a caller's packet

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

bool is_withdrawal(std::span<const std::byte> packet) {
  Question question{};
  if (packet.size() != sizeof(question)) return false;
  std::memcpy(static_cast<void*>(&question), packet.data(), sizeof(question));
  return question.ask == Ask::withdraw;
}

Loss loss_of(const int& rank) { return {.ranks = {&rank, 1}}; }

}  // namespace

Door::Door(Comm& comm, const Secret& secret)
    : comm_(comm),
      secret_(secret),
      wake_(::eventfd(0, EFD_CLOEXEC)),
      card_{make_random<Tag>(), {}, this_process()},
      buffer_(kRoom) {
  if (!wake_) fail_errno("eventfd", errno);
  const auto& hosts = comm.host_names();
  if (!hosts.empty()) std::ranges::copy(hosts[at(comm.rank())], card_.host_name.begin());
  listener_ = listen_for_links(card_.socket_name, kMostCallers);
  comm.door_place(comm.hosts().self()).card.write(card_);
}

void Door::open() {
  thread_ = start_thread("xd-door", [this] { run(); });
}

Door::~Door() {
  leaving_.store(true, std::memory_order_release);
  ::eventfd_write(wake_.get(), 1);
  if (thread_.joinable()) thread_.join();
  const MeshHeader goodbye{MeshMessageType::goodbye, 0, 0, comm_.rank()};
  const Deadline deadline = Deadline::after_ms(kGoodbyeMs);
  for (const auto& caller : callers_) {
    if (caller->state != Caller::State::is_in || !caller->fd) continue;
    const MeshLink link(std::move(caller->fd));
    tell_all({&link, 1}, goodbye, {}, deadline);
  }
}

xd_unique_id Door::invite() const {
  Invitation invitation{.secret = secret_, .doors = {card_.socket_name}};
  for (const NearRank rank : comm_.hosts().peers()) {
    if (invitation.doors.size() == Invitation::kMostDoors) break;
    const auto card = comm_.door_place(rank).card.read();
    if (!comm_.errors().lost(rank) && card) invitation.doors.push_back(card->socket_name);
  }
  return encode_invitation(invitation);
}

// A rank that would not notice the end of those it has let in must not go on.
void Door::run() noexcept {
  try {
    while (!leaving_.load(std::memory_order_acquire)) wait_and_serve();
  } catch (...) {
    std::array<char, 256> text;
    const Caught error = caught(text);
    comm_.errors().on_end(error.status, error.error_number);
    std::array<char, 32> name;
    std::snprintf(name.data(), name.size(), "rank %d", comm_.rank());
    log_warning(name.data(), " lets no process in any more: ", text.data());
  }
}

void Door::wait_and_serve() {
  PollList items;
  std::vector<int> calls, ends;
  const bool accepts = accept_again_.passed() && std::ranges::count_if(callers_, [](const auto& c) {
                                                   return c->state != Caller::State::is_in;
                                                 }) < kMostCallers;
  items.add(wake_.get(), POLLIN);
  const int listener = items.add(accepts ? listener_.get() : -1, POLLIN);
  int pause_ms = accept_again_.passed() ? -1 : kAcceptPauseMs;
  for (const auto& caller : callers_) {
    calls.push_back(items.add(caller->fd.get(), POLLIN));
    const bool counts =
        caller->state == Caller::State::holds || caller->state == Caller::State::is_in;
    ends.push_back(items.add(counts && !caller->has_ended ? caller->pidfd.get() : -1, POLLIN));
    if (!has_limit(*caller)) continue;
    const int left = caller->state == Caller::State::waits ? kLookMs : caller->limit.remaining_ms();
    pause_ms = pause_ms < 0 ? left : std::min(pause_ms, left);
  }
  if (items.wait(pause_ms) < 0) {
    if (errno != EINTR) fail_errno("poll", errno);
    return;
  }
  for (std::size_t i = 0; i < calls.size(); ++i) {
    attend(*callers_[i], items.has_news(calls[i]), items.has_news(ends[i]));
  }
  grant();
  std::erase_if(callers_, [](const auto& caller) { return caller->is_over; });
  if (items.has_news(listener)) accept();
}

bool Door::has_limit(const Caller& caller) const {
  return caller.state != Caller::State::is_in && caller.fd && !caller.is_late;
}

// An error that one caller has caused ends that caller alone, unless it is a rank.
void Door::attend(Caller& caller, bool calls, bool has_ended) {
  try {
    if (calls) serve(caller);
    if (has_ended) on_process_end(caller);
    if (has_limit(caller) && caller.limit.passed()) give_up(caller);
  } catch (...) {
    if (caller.state == Caller::State::is_in) throw;
    caller.is_late ? hang_up(caller) : give_up(caller);
  }
}

void Door::accept() try {
  UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd) {
    accept_again_ = Deadline::after_ms(kAcceptPauseMs);
    return;
  }
  if (!peer_has_our_user(fd.get())) return;
  const pid_t pid = peer_process(fd.get());
  // The process lives as long as it answers here, so the number is not another's yet.
  UniqueFd pidfd = pid > 0 ? open_pidfd(pid) : UniqueFd();
  if (pid > 0 && !pidfd && (errno == EMFILE || errno == ENFILE)) {
    accept_again_ = Deadline::after_ms(kAcceptPauseMs);
    return;
  }
  callers_.push_back(std::make_unique<Caller>(
      Caller{.fd = std::move(fd),
             .pidfd = std::move(pidfd),
             .pid = pid,
             .handshake = Handshake(Side::server, secret_, at(comm_.rank())),
             .limit = Deadline::after_ms(kGreetingMs)}));
} catch (...) {
  accept_again_ = Deadline::after_ms(kAcceptPauseMs);  // no memory
}

// Takes all that has come from a caller.
void Door::serve(Caller& caller) {
  while (caller.fd && !caller.is_over) {
    const Packet packet = receive_packet(caller.fd.get(), buffer_);
    if (packet.kind == Packet::Kind::nothing_yet) return;
    if (packet.kind != Packet::Kind::data || packet.fd || packet.fd_discarded)
      return hang_up(caller);
    switch (caller.state) {
      case Caller::State::greets:
        greet(caller, packet.bytes);
        break;
      case Caller::State::is_in:
        hear(caller, packet.bytes);
        break;
      default:
        answer(caller, packet.bytes);
    }
  }
}

void Door::greet(Caller& caller, std::span<const std::byte> bytes) {
  if (bytes.size() != caller.handshake.wanted()) return hang_up(caller);
  caller.handshake.receive(bytes);
  const Bytes output = caller.handshake.take_output();
  const bool sent = output.empty() || send_packet(caller.fd.get(), output) == Sent::done;
  if (caller.handshake.refusal() != Refusal::none) {
    log_warning(comm_.errors().names().of(comm_.rank()), " does not let a process (pid ",
                caller.pid, ") in: it ", caller.handshake.refusal_text());
    return hang_up(caller);
  }
  if (!sent) return hang_up(caller);
  if (!caller.handshake.proven()) return;
  caller.state = Caller::State::asks;
  caller.limit = comm_.deadline();
}

void Door::answer(Caller& caller, std::span<const std::byte> packet) {
  Question question{};
  const bool is_goodbye = packet.size() == sizeof(MeshHeader);  // of one that has failed meanwhile
  if (packet.size() < sizeof(question)) return hang_up(caller);
  std::memcpy(static_cast<void*>(&question), packet.data(), sizeof(question));
  const auto more = packet.subspan(sizeof(question));
  if (is_goodbye && question.ask != Ask::group) return;  // it withdraws when it has unmapped all
  if (question.ask == Ask::withdraw) {
    caller.is_over = true;
    return;
  }
  try {
    reply(caller, question, more);
  } catch (const Error& error) {
    refuse(caller, error);
  }
}

void Door::reply(Caller& caller, const Question& question, std::span<const std::byte> more) {
  const bool holds = caller.state == Caller::State::holds;
  switch (question.ask) {
    case Ask::enter:
      return say(caller, enter(question));
    case Ask::control:
      return pass(caller, shared(comm_.errors().segments(), question.rank));
    case Ask::claim:
      return claim(caller, question);
    case Ask::heap: {
      const auto all = comm_.heap().all();
      XD_REQUIRE(question.number >= 0 && at(question.number) < all.size(), "there is no segment ",
                 question.number);
      return pass(caller, shared(all[at(question.number)], question.rank));
    }
    case Ask::group: {
      const std::string call(reinterpret_cast<const char*>(more.data()), more.size());
      const auto group = comm_.catalogue().next(question.number, call);
      if (!group) return say(caller, {.number = -1});
      return say(caller, {.number = group->number}, group->terms);
    }
    case Ask::group_memory:
      return pass(caller, comm_.catalogue().memory(question.number, question.rank));
    case Ask::ready:
      XD_REQUIRE(holds && !caller.is_late, "the process holds no place here");
      return let_in(caller);
    default:
      hang_up(caller);
  }
}

// ---- Places ------------------------------------------------------------------------------------

Reply Door::enter(const Question& question) const {
  comm_.errors().check_usable();
  const int num_ranks = comm_.num_ranks();
  XD_REQUIRE(question.number == 0 || question.number == num_ranks,
             "config.num_ranks = ", question.number, ", expected 0 or ", num_ranks,
             " as the communicator has");
  XD_REQUIRE(question.rank >= -1 && question.rank < num_ranks, "config.rank = ", question.rank,
             ", expected -1 to ", num_ranks - 1);
  const int place = question.rank >= 0 ? question.rank : free_place();
  require_ended(place);
  return {.rank = place, .number = num_ranks};
}

int Door::free_place() const {
  for (int place = 0; place < comm_.num_ranks(); ++place) {
    const bool is_claimed = std::ranges::any_of(callers_, [=](const auto& caller) {
      return caller->place == place && caller->state != Caller::State::is_in;
    });
    if (!is_claimed && has_ended(place)) return place;
  }
  fail(XD_ERROR_INVALID_ARGUMENT, "config.rank = -1: the processes of all ", comm_.num_ranks(),
       " ranks live, or their places are being taken, expected one that has ended");
}

const Door::Caller* Door::holder_of(int place) const {
  const auto found = std::ranges::find_if(callers_, [=](const auto& caller) {
    return caller->place == place && caller->state == Caller::State::is_in;
  });
  return found != callers_.end() ? found->get() : nullptr;
}

bool Door::has_ended(int place) const {
  if (place == comm_.rank()) return false;
  if (const Caller* holder = holder_of(place))
    return holder->gave_back || has_process_ended(holder->pidfd);
  const PeerProcess& first = comm_.process_of(place);
  return first.has_ended || has_process_ended(first.pidfd);
}

// Throws unless the process of the rank has ended. Until then it may still write into memory of
// others.
void Door::require_ended(int place) const {
  if (has_ended(place)) return;
  const std::string who = comm_.errors().names().with_process(place);
  const auto card = comm_.door_place(*comm_.hosts().find_near(place)).card.read();
  const bool is_here = card && card->process == card_.process;
  if (!is_here && holder_of(place) == nullptr && !comm_.process_of(place).pidfd)
    fail(XD_ERROR_UNSUPPORTED, "config.rank = ", place, ": ",
         comm_.errors().names().of(comm_.rank()), " cannot know when the process of ", who,
         " ends: the system has no descriptors of processes (pidfd), or has shown it none");
  fail(XD_ERROR_INVALID_ARGUMENT, "config.rank = ", place, ": ", who,
       " lives, expected a place whose process has ended");
}

void Door::claim(Caller& caller, const Question& question) {
  const int place = question.rank;
  XD_REQUIRE(caller.state == Caller::State::asks && place >= 0 && place < comm_.num_ranks(),
             "the process cannot claim rank ", place);
  if (!caller.pidfd)
    fail(XD_ERROR_UNSUPPORTED, comm_.errors().names().of(comm_.rank()),
         " could not know when the process ends that takes a place: it is in another namespace of "
         "processes, or the system has no descriptors of processes (pidfd)");
  caller.place = place;
  caller.state = Caller::State::waits;
  const std::int64_t ms = question.number >= 0 ? question.number : comm_.timeout_ms();
  caller.limit = Deadline::after_ms(ms + kPatienceMs);
}

// Answers the claims that need not wait any more.
void Door::grant() {
  for (const auto& caller : callers_) {
    if (caller->state != Caller::State::waits || caller->is_over) continue;
    try {
      comm_.errors().check_usable();
      require_ended(caller->place);
      if (may_hold(*caller)) hold(*caller);
    } catch (const Error& error) {
      caller->state = Caller::State::asks;
      caller->place = -1;
      refuse(*caller, error);
    } catch (...) {
      caller->state = Caller::State::asks;
      caller->place = -1;
      hang_up(*caller);
    }
  }
}

void Door::hold(Caller& caller) {
  comm_.catalogue().mask(*comm_.hosts().find_near(caller.place));
  Reply reply{.rank = caller.place, .number = static_cast<int>(comm_.heap().all().size())};
  Members here, ended;
  for (int r = 0; r < comm_.num_ranks(); ++r) {
    if (!comm_.errors().lost(r) && !has_ended(r)) here.add(r);  // the watch may be a bit behind
    const bool is_held = std::ranges::any_of(callers_, [r](const auto& other) {
      return other->state == Caller::State::holds && other->place == r && !other->is_over;
    });
    if (has_ended(r) && !is_held) ended.add(r);
  }
  reply.here = here.words();
  reply.ended = ended.words();
  caller.state = Caller::State::holds;
  say(caller, reply);
}

bool Door::may_hold(const Caller& caller) const {
  if (!comm_.errors().lost(caller.place)) return false;  // the watch has yet to notice it
  if (comm_.views().known().now.members.has(caller.place)) return false;
  // One at a time is let in, so that those who are know each other.
  return std::ranges::none_of(callers_, [&](const auto& other) {
    if (other->state != Caller::State::holds || other->is_over) return false;
    return (other->fd && !other->is_late) || other->place == caller.place;
  });
}

void Door::let_in(Caller& caller) {
  comm_.errors().check_usable();
  for (const auto& other : callers_)
    if (other->state == Caller::State::is_in && other->place == caller.place) other->forget();
  caller.state = Caller::State::is_in;
  comm_.errors().on_replaced(caller.place, caller.pid);
  log_topic("comm", comm_.errors().names().with_process(caller.place),
            " has taken a place that was free");
  say(caller, {.rank = caller.place});
}

// ---- Ranks that were let in --------------------------------------------------------------------

void Door::hear(Caller& caller, std::span<const std::byte> packet) {
  if (is_withdrawal(packet)) {  // its creation has failed at another rank
    caller.gave_back = true;
    return hang_up(caller);
  }
  const auto message = decode_mesh_packet(packet, false);
  if (!message || message->header.source != caller.place) return hang_up(caller);
  switch (message->header.type) {
    case MeshMessageType::goodbye:
    case MeshMessageType::failure:
      if (!std::exchange(caller.has_left, true)) comm_.errors().on_left(caller.place);
      return;
    case MeshMessageType::abort:
      return comm_.errors().on_abort(caller.place);
    default:
      return;  // nothing that concerns this rank
  }
}

// The connection of a caller has ended.
void Door::hang_up(Caller& caller) {
  caller.fd.reset();
  switch (caller.state) {
    case Caller::State::holds:
      return;  // until its process has ended
    case Caller::State::is_in:
      if (!std::exchange(caller.has_left, true)) comm_.errors().on_lost(loss_of(caller.place));
      return;
    default:
      caller.is_over = true;
  }
}

// Ends the connection with a caller that lives. One that holds a place hears that it has lost it,
// and has to say that it uses nothing of it any more, or to end, before the place is free.
void Door::give_up(Caller& caller) {
  if (caller.state != Caller::State::holds || !caller.fd) return hang_up(caller);
  caller.is_late = true;
  ::shutdown(caller.fd.get(), SHUT_WR);
}

void Door::on_process_end(Caller& caller) {
  serve(caller);  // its earlier words count
  caller.has_ended = true;
  if (caller.state == Caller::State::holds) caller.is_over = true;
  if (caller.state == Caller::State::is_in) hang_up(caller);
}

// ---- Answers -----------------------------------------------------------------------------------

void Door::say(Caller& caller, const Reply& reply, std::span<const std::byte> more, int passed) {
  if (send_packet(caller.fd.get(), std::as_bytes(std::span(&reply, 1)), more, passed) != Sent::done)
    give_up(caller);
}

void Door::refuse(Caller& caller, const Error& error) {
  if (caller.fd) say(caller, {.status = error.status()}, bytes_of(error.text()));
}

std::shared_ptr<Segment> Door::shared(const std::vector<std::shared_ptr<Segment>>& of_rank,
                                      int rank) {
  return rank >= 0 && at(rank) < of_rank.size() ? of_rank[at(rank)] : nullptr;
}

// Memory that is not there is answered without a descriptor.
void Door::pass(Caller& caller, const std::shared_ptr<Segment>& segment) {
  if (!segment) return say(caller, {.number = 0});
  const std::uint64_t bytes = segment->bytes();
  say(caller, {.number = 1}, std::as_bytes(std::span(&bytes, 1)), segment->descriptor());
}

}  // namespace xd
