#include "meet/connector.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/math.h"
#include "meet/inbox.h"
#include "meet/packet.h"
#include "meet/several_hosts.h"

namespace xd {
namespace {

constexpr int kRedialMs = 5;             // a listener that had no room
constexpr int kRedialRemoteMs = 100;     // another host that could not be reached
constexpr std::size_t kSpareCalls = 64;  // connections beyond those that the ranks need
constexpr int kCallerMs = 5000;          // for a caller over TCP to prove the secret
constexpr int kAcceptPauseMs = 50;       // the system has no memory for a connection
// The time in which ranks mostly have called; then others keep vigils with those that have not.
constexpr int kBeforeVigilsMs = 200;
// A rank whose call is awaited may refuse calls that long: a firewall may let one direction pass.
constexpr int kRefusedMs = 500;

bool is_exhausted(int error) { return error == EMFILE || error == ENFILE; }

}  // namespace

MeshConnector::MeshConnector(const MetRanks& ranks, MeshListeners listeners,
                             DescriptorReserve reserve, int silence_ms)
    : ranks_(ranks),
      rank_(ranks.rank()),
      listeners_(std::move(listeners)),
      reserve_(std::move(reserve)),
      silence_ms_(silence_ms),
      reach_ms_(silence_ms > 0 ? bounds_of_silence(silence_ms).give_up_ms : 0),
      reach_by_(at(ranks.num_ranks()), Deadline::after_ms(reach_ms_)),
      dial_again_(Deadline::after_ms(0)),
      keep_vigils_(Deadline::after_ms(kBeforeVigilsMs)),
      accept_again_(dial_again_),
      links_(at(ranks.num_ranks())),
      vigils_(at(ranks.num_ranks())),
      closed_(at(ranks.num_ranks())),
      deaf_(at(ranks.num_ranks())) {
  for (int r = 0; r < ranks_.num_ranks(); ++r)
    if (r < rank_ ? ranks_.rails.is_linked(r) : ranks_.rails.is_rail(r)) to_dial_.push_back(r);
}

std::vector<MeshLink> MeshConnector::run(const Deadline& deadline) {
  try {
    connect(deadline);
    return std::move(links_);
  } catch (...) {
    say_farewell();
    throw;
  }
}

void MeshConnector::give_up() noexcept {
  try {
    for (const int rank : to_dial_) {
      if (connected(rank) || !ranks_.rails.is_near(rank)) continue;
      const UniqueFd fd = connect_link(ranks_.introductions[at(rank)].socket_name);
      if (fd)
        send_packet(fd.get(), Handshake(Side::client, ranks_.secret, at(rank_)).take_output());
    }
  } catch (...) {
  }
}

// Called inside a catch block. Each rank says why it gives up also to the ranks of other hosts that
// it is about to be connected to.
void MeshConnector::say_farewell() noexcept {
  farewell_.emplace();
  const bool several = ranks_.rails.num_hosts() > 1;
  // On one host every rank notices and names a peer that is gone.
  if (several || farewell_->status() != XD_ERROR_PEER_LOST) farewell_->tell(links_, rank_);
  farewell_->tell(vigils_, rank_);
  give_up();
  if (!several) return;
  keep_vigils_ = dial_again_ = Deadline::after_ms(0);
  const Deadline deadline = Deadline::after_ms(kFarewellMs);
  while (has_untold() && !deadline.passed()) {
    try {
      dial();
      wait(deadline);
    } catch (...) {  // others may be gone, too
    }
  }
  // A forked child may hold it open.
  if (listeners_.remote) ::shutdown(listeners_.remote.get(), SHUT_RDWR);
  const Deadline end = Deadline::after_ms(kFarewellMs);
  finish_saying(links_, end);
  finish_saying(vigils_, end);
}

// A lower rank listens to its vigil until this rank has called it; one that refuses that call may
// keep a vigil yet.
bool MeshConnector::has_untold() const {
  for (int r = 0; r < ranks_.num_ranks(); ++r) {
    const bool refuses = refused_.contains(r), has_vigil = static_cast<bool>(vigils_[at(r)]);
    const bool told = connected(r) || (r < rank_ ? refuses && has_vigil : refuses || has_vigil);
    if (ranks_.rails.is_rail(r) && !told) return true;
    if (is_untold_neighbour(r)) return true;
  }
  return false;
}

// A rank of this host that would find this one gone, and blame it: a higher one, which will call,
// unless it has ended or given up; a lower one that is being called.
bool MeshConnector::is_untold_neighbour(int rank) const {
  if (rank == rank_ || !ranks_.rails.is_near(rank) || connected(rank) || deaf_[at(rank)])
    return false;
  if (rank < rank_)
    return std::ranges::any_of(calls_, [=](const auto& call) { return call->rank == rank; });
  const PeerProcesses& all = ranks_.processes;
  const PeerProcess& process = all.processes[at(all.of_rank[at(rank)])];
  pollfd end{.fd = process.pidfd.get(), .events = POLLIN, .revents = 0};
  return !process.has_ended && ::poll(&end, 1, 0) == 0;
}

void MeshConnector::connect(const Deadline& deadline) {
  for (const PeerProcess& process : ranks_.processes.processes)
    if (process.has_ended) fail_ended(process);
  Interruption interruption;
  while (true) {
    dial();
    const std::vector<int> absent = missing();
    if (absent.empty()) return;
    if (deadline.passed())
      fail(XD_ERROR_TIMEOUT, ranks_.names.of(absent), " did not connect to ",
           ranks_.names.of(rank_), " in time");
    interruption.check();
    wait(interruption.next(deadline));
  }
}

std::vector<int> MeshConnector::missing() const {
  std::vector<int> result;
  for (int r = 0; r < ranks_.num_ranks(); ++r)
    if (ranks_.rails.is_linked(r) && !connected(r)) result.push_back(r);
  return result;
}

// Opens a connection. Where there is no descriptor for it, a stranger over TCP goes, else it gets
// one from the reserve.
template <class Open>
UniqueFd MeshConnector::open_one(Open open) {
  while (true) {
    UniqueFd fd = open();
    if (fd || !is_exhausted(errno)) return fd;
    const int error = errno;
    if (!send_stranger_away()) {
      errno = error;
      if (reserve_.size() == 0) return fd;
      reserve_.shrink_to(reserve_.size() - 1);
    }
  }
}

void MeshConnector::dial() {
  const bool again = dial_again_.passed(), keeps_vigils = again && keep_vigils_.passed();
  std::erase_if(to_dial_, [&](int rank) {
    if (connected(rank)) return true;
    if (ranks_.rails.is_near(rank)) return farewell_ || dial_near(rank);
    return (rank < rank_ ? again : keeps_vigils) && dial_remote(rank);
  });
}

// False = later.
bool MeshConnector::dial_near(int rank) {
  UniqueFd fd = open_one([&] { return connect_link(ranks_.introductions[at(rank)].socket_name); });
  if (!fd && errno == EAGAIN) return false;
  // Every rank listens before it introduces itself.
  if (!fd && errno == ECONNREFUSED) fail_gone(rank);
  if (!fd) fail_errno(concat("connect to rank ", rank), errno);
  if (!peer_has_our_user(fd.get()))
    fail(XD_ERROR_MISMATCH, "rank ", rank, " runs as another user than rank ", rank_);
  calls_.push_back(std::make_unique<Call>(
      Call{std::move(fd), Handshake(Side::client, ranks_.secret, at(rank_)), rank}));
  advance(*calls_.back());
  return true;
}

bool MeshConnector::dial_remote(int rank) {
  // The peer checks that the connection comes from the address that this rank has named.
  const TcpAddress here = control_address(ranks_.introductions[at(rank_)]);
  const auto call = [&] {
    return tcp_begin_connect(control_address(ranks_.introductions[at(rank)]), &here, kStreamRoom);
  };
  // The reserve is for the links.
  UniqueFd fd = rank < rank_ ? open_one(call) : call();
  if (!fd) {
    if (is_exhausted(errno) && rank < rank_) fail_errno("socket", errno);
    cannot_reach(rank, errno);
    return false;
  }
  calls_.push_back(std::make_unique<Call>(
      Call{std::move(fd), Handshake(Side::client, ranks_.secret, at(rank_)), rank, true, true}));
  return true;
}

// The other host has answered a call over TCP, or cannot.
void MeshConnector::answered(Call& call) {
  call.is_connecting = false;
  if (const int error = connect_error(call.fd.get()); error != 0) {
    call.fd.reset();
    to_dial_.push_back(call.rank);
    return cannot_reach(call.rank, error);
  }
  refused_.erase(call.rank);
  set_silence(call.fd.get(), silence_ms_);
  reach_by_[at(call.rank)] = Deadline::after_ms(reach_ms_);
  advance(call);
}

// Every rank listens before it introduces itself, and until all are connected.
void MeshConnector::cannot_reach(int rank, int error) {
  const auto& introductions = ranks_.introductions;
  const std::string address = control_address(introductions[at(rank)]).text();
  dial_again_ = Deadline::after_ms(kRedialRemoteMs);
  if (error == ECONNREFUSED) {
    const Deadline& last_word =
        refused_.emplace(rank, Deadline::after_ms(kRefusedMs)).first->second;
    if (rank > rank_ && !last_word.passed()) return;
    fail(XD_ERROR_PEER_LOST, ranks_.names.of(rank),
         " has gone while the ranks were connecting, or a firewall refuses ", address);
  }
  if (silence_ms_ <= 0 || !reach_by_[at(rank)].passed()) return;
  fail(XD_ERROR_TIMEOUT, ranks_.names.of(rank_), " cannot reach ", ranks_.names.of(rank), " at ",
       address, " from ", control_address(introductions[at(rank_)]).host(), " within ", reach_ms_,
       " ms: ", std::strerror(error), " (errno ", error, ")");
}

MeshConnector::Places MeshConnector::list(PollList& items) const {
  Places places;
  const bool accepts = accept_again_.passed();
  places.near = items.add(accepts ? listeners_.near.get() : -1, POLLIN);
  places.remote = items.add(accepts ? listeners_.remote.get() : -1, POLLIN);
  for (const auto& call : calls_)
    places.calls.push_back(items.add(call->fd.get(), call->is_connecting ? POLLOUT : POLLIN));
  for (const MeshLink& vigil : vigils_) places.vigils.push_back(items.add(vigil.get(), POLLIN));
  if (farewell_) return places;  // which does not ask what else is lost
  for (const PeerProcess& process : ranks_.processes.processes)
    places.processes.push_back(items.add(is_awaited(process) ? process.pidfd.get() : -1, POLLIN));
  // Messages of peers over finished links are read later; a peer that hangs up is noticed now.
  for (std::size_t r = 0; r < links_.size(); ++r) {
    const short hang_up = links_[r].is_tcp() ? POLLRDHUP : 0;
    places.links.push_back(items.add(closed_[r] ? -1 : links_[r].get(), hang_up));
  }
  return places;
}

void MeshConnector::wait(const Deadline& deadline) {
  PollList items;
  const Places places = list(items);
  if (items.wait(next_look(deadline).remaining_ms()) < 0) {
    if (errno != EINTR) fail_errno("poll", errno);
    return;
  }
  // These come first: ranks that hear of them give up, and are not to be blamed.
  for (std::size_t p = 0; p < places.processes.size(); ++p)
    if (items.has_news(places.processes[p])) fail_ended(ranks_.processes.processes[p]);
  for (std::size_t r = 0; r < vigils_.size(); ++r)
    if (items.has_news(places.vigils[r])) check_vigil(static_cast<int>(r));
  for (std::size_t r = 0; r < places.links.size(); ++r)
    if (items.has_news(places.links[r])) check_link(static_cast<int>(r));
  serve_calls(items, places.calls);
  close_overdue_callers();
  std::erase_if(calls_, [](const auto& call) { return !call->fd; });
  if (items.has_news(places.near)) accept(listeners_.near.get(), false);
  if (items.has_news(places.remote)) accept(listeners_.remote.get(), true);
}

void MeshConnector::serve_calls(const PollList& items, const std::vector<int>& places) {
  for (std::size_t i = 0; i < places.size(); ++i) {
    Call& call = *calls_[i];
    if (call.is_connecting && connected(call.rank)) {  // a vigil that is not needed any more
      call.fd.reset();
    } else if (!items.has_news(places[i])) {
      // This process may have stood still itself, so what has come is looked at first.
      if (call.is_connecting && silence_ms_ > 0 && reach_by_[at(call.rank)].passed())
        cannot_reach(call.rank, ETIMEDOUT);
    } else if (call.is_connecting) {
      answered(call);
    } else {
      read(call);
    }
  }
}

// The time at which there is something to do even if nothing happens.
Deadline MeshConnector::next_look(const Deadline& deadline) const {
  auto when = deadline.when();
  if (!accept_again_.passed()) when = std::min(when, accept_again_.when());
  for (const int rank : to_dial_) {
    auto dial = dial_again_.when();
    if (ranks_.rails.is_near(rank)) dial = Deadline::after_ms(kRedialMs).when();
    when = std::min(when, rank < rank_ ? dial : std::max(dial, keep_vigils_.when()));
  }
  for (const auto& call : calls_) {
    if (call->is_connecting && silence_ms_ > 0)
      when = std::min(when, reach_by_[at(call->rank)].when());
    if (call->is_stranger()) when = std::min(when, call->limit.when());
  }
  return Deadline(when);
}

void MeshConnector::accept(int listener, bool over_tcp) {
  TcpAddress from;
  UniqueFd fd = open_one([&] { return tcp_accept(listener, from); });
  if (!fd) {
    // The connection, if it is still there, stays in the queue, and so does its event.
    if (is_exhausted(errno)) fail_errno("accept of a peer's connection", errno);
    if (is_passing(errno)) accept_again_ = Deadline::after_ms(kAcceptPauseMs);
    return;
  }
  if (!over_tcp && !peer_has_our_user(fd.get())) return warn("it comes from another user");
  // Calls to ranks, calls from ranks, and strangers.
  const bool has_room = calls_.size() < 2 * links_.size() + kSpareCalls;
  if (!has_room && !(over_tcp && send_stranger_away()))
    return warn(concat(calls_.size(), " others have not said who they are"));
  calls_.push_back(
      std::make_unique<Call>(Call{std::move(fd), Handshake(Side::server, ranks_.secret, at(rank_)),
                                  -1, over_tcp, false, Deadline::after_ms(kCallerMs), from}));
}

// Anybody may call over TCP, and who has listened to a rank can greet as it does. A rank greets at
// once, and calls again if it was not heard; so the oldest caller over TCP that has said nothing
// goes first, else the oldest of all. False = there is none.
bool MeshConnector::send_stranger_away() {
  const auto oldest = [this](bool silent) {
    return std::ranges::find_if(calls_, [=](const auto& call) {
      return call->fd && call->is_stranger() && !(silent && call->handshake.peer_greeted());
    });
  };
  auto stranger = oldest(true);
  if (stranger == calls_.end()) stranger = oldest(false);
  if (stranger == calls_.end()) return false;
  warn("it had not proved the secret when its room was needed");
  calls_.erase(stranger);
  return true;
}

void MeshConnector::close_overdue_callers() {
  for (const auto& call : calls_) {
    if (!call->fd || !call->is_stranger() || !call->limit.passed()) continue;
    warn("it was silent for too long");
    call->fd.reset();
  }
}

void MeshConnector::read(Call& call) {
  while (call.fd && call.handshake.wanted() != 0)
    if (!receive(call)) return;
}

// Receives a part of the handshake; false = there is none now.
bool MeshConnector::receive(Call& call) {
  std::array<std::byte, sizeof(Hello)> buffer;
  std::span<const std::byte> bytes;
  if (call.over_tcp) {
    const auto room = std::span(buffer).first(call.handshake.wanted());
    std::size_t count = 0;
    if (!receive_some(call.fd.get(), room, count)) return hung_up(call), false;
    bytes = room.first(count);
  } else {
    const Packet packet = receive_packet(call.fd.get(), buffer);
    if (packet.kind == Packet::Kind::nothing_yet) return false;
    if (packet.kind == Packet::Kind::end) return hung_up(call), false;
    // Each frame of the handshake is one packet.
    if (packet.kind == Packet::Kind::malformed || packet.fd ||
        packet.bytes.size() != call.handshake.wanted())
      return fail_or_drop(call, "does not speak this library's protocol"), false;
    bytes = packet.bytes;
  }
  if (bytes.empty()) return false;
  call.handshake.receive(bytes);
  advance(call);
  return true;
}

// A frame of the handshake fits into a new connection.
bool MeshConnector::send(const Call& call, std::span<const std::byte> bytes) const {
  std::size_t sent = 0;
  if (call.over_tcp) return send_some(call.fd.get(), bytes, sent) && sent == bytes.size();
  return send_packet(call.fd.get(), bytes) == Sent::done;
}

void MeshConnector::advance(Call& call) {
  const Bytes output = call.handshake.take_output();
  if (!output.empty() && !send(call, output)) return hung_up(call);
  if (call.handshake.refusal() != Refusal::none)
    return fail_or_drop(call, call.handshake.refusal_text());
  if (call.handshake.proven()) establish(call);
}

void MeshConnector::establish(Call& call) {
  const std::uint64_t sender = call.handshake.peer_sender();
  const int rank = static_cast<int>(std::min<std::uint64_t>(sender, links_.size()));
  if (!may_be(call, rank)) return fail_or_drop(call, concat("says it is rank ", sender));
  const bool is_vigil = call.over_tcp && (call.rank >= 0) == (rank > rank_);
  if (connected(rank) && !is_vigil) return fail_or_drop(call, concat("is a second rank ", sender));
  if (call.is_stranger()) set_silence(call.fd.get(), silence_ms_);
  MeshLink link =
      call.over_tcp ? MeshLink::over_tcp(std::move(call.fd)) : MeshLink(std::move(call.fd));
  if (farewell_) farewell_->tell({&link, 1}, rank_);
  if (is_vigil) return keep_vigil(rank, std::move(link));
  links_[at(rank)] = std::move(link);
  if (rank > rank_) vigils_[at(rank)] = {};
  if (call.is_stranger()) check_route(call, rank);
}

bool MeshConnector::may_be(const Call& call, int rank) const {
  if (call.rank >= 0) return rank == call.rank;
  if (at(rank) >= links_.size() || !ranks_.rails.is_linked(rank)) return false;
  return ranks_.rails.is_near(rank) ? !call.over_tcp && rank > rank_ : call.over_tcp;
}

// It is of no use where the ranks are connected meanwhile, and must take no descriptor from the
// links that are to come.
void MeshConnector::keep_vigil(int rank, MeshLink link) {
  if (!connected(rank) && (rank > rank_ || reserve_.size() >= missing().size()))
    vigils_[at(rank)] = std::move(link);
}

// Other connections than these will go to the addresses that the ranks have named.
void MeshConnector::check_route(const Call& call, int rank) const {
  const std::string named = control_address(ranks_.introductions[at(rank)]).host();
  const std::string seen = call.from.host();
  if (seen == named) return;
  fail(XD_ERROR_MISMATCH, ranks_.names.of(rank), " has the address ", named, " and reaches ",
       ranks_.names.of(rank_), " from ", seen,
       ", expected the same: addresses must not be translated between hosts (NAT)");
}

// A caller over TCP has proven nothing. On this host the kernel has vouched for its user, and its
// hello has named our meeting, so it is one of the ranks, and has failed since. A rank that was
// called over TCP may have had no room for this caller.
void MeshConnector::hung_up(Call& call) {
  if (farewell_ && !call.over_tcp) {  // it has given up as well
    const int caller =
        call.handshake.peer_greeted() ? static_cast<int>(call.handshake.peer_sender()) : call.rank;
    if (caller >= 0 && at(caller) < deaf_.size()) deaf_[at(caller)] = true;
    return call.fd.reset();
  }
  if (call.rank < 0) {
    if (!call.over_tcp && call.handshake.peer_greeted())
      fail_gone(static_cast<int>(call.handshake.peer_sender()));
    return fail_or_drop(call, "closed the connection before it had proved who it is");
  }
  if (!call.over_tcp) fail_gone(call.rank);
  call.fd.reset();
  dial_again_ = Deadline::after_ms(kRedialRemoteMs);
  reach_by_[at(call.rank)] = Deadline::after_ms(reach_ms_);
  to_dial_.push_back(call.rank);
}

// A rank that was called must answer; a caller may be a stranger.
void MeshConnector::fail_or_drop(Call& call, const std::string& reason) {
  call.fd.reset();
  if (call.rank >= 0)
    fail(XD_ERROR_PEER_LOST, ranks_.names.of(call.rank), " is lost: what listens in its place ",
         reason);
  warn("it " + reason);
}

void MeshConnector::warn(const std::string& reason) {
  warnings_.warn(error_text("refused a connection to rank ", rank_, ": ", reason));
}

// Ranks that are connected may have done their work and left; the watch thread will report it.
bool MeshConnector::is_awaited(const PeerProcess& process) const {
  return std::any_of(process.ranks.begin(), process.ranks.end(),
                     [this](int r) { return ranks_.rails.is_linked(r) && !connected(r); });
}

void MeshConnector::check_link(int rank) {
  const MeshLink& link = links_[at(rank)];
  // With several hosts this may be all that this rank hears of a peer elsewhere that has failed.
  if (ranks_.rails.num_hosts() > 1) fail_gone(rank, listen(link).silent);
  if (!has_packet(link.get())) fail_gone(rank);
  closed_[at(rank)] = true;
}

void MeshConnector::check_vigil(int rank) {
  const Packet packet = listen(vigils_[at(rank)]);
  if (packet.kind == Packet::Kind::nothing_yet) return;
  vigils_[at(rank)] = {};
  if (rank < rank_) return;  // this rank's own call tells more
  if (packet.silent) fail_gone(rank, true);
  dial_again_ = Deadline::after_ms(kRedialRemoteMs);
  reach_by_[at(rank)] = Deadline::after_ms(reach_ms_);
  to_dial_.push_back(rank);
}

// Reads what a peer has said. Throws its reason if it has given up, or that of another rank which
// it passes on.
Packet MeshConnector::listen(const MeshLink& link) const {
  Bytes buffer(kMaxMeshPacket);
  Packet packet;
  while ((packet = link.receive(buffer)).kind == Packet::Kind::data) {
    const auto message = decode_mesh_packet(packet.bytes, static_cast<bool>(packet.fd));
    if (!message || message->header.type != MeshMessageType::failure) continue;
    fail(status_after(message->header), ranks_.names.of(message->header.source),
         " failed: ", message->text());
  }
  return packet;
}

void MeshConnector::fail_ended(const PeerProcess& process) const {
  fail(XD_ERROR_PEER_LOST, ranks_.names.of(process.ranks),
       ": the process ended while the ranks were connecting");
}

void MeshConnector::fail_gone(int rank, bool silent) const {
  if (silent) fail(XD_ERROR_PEER_LOST, ranks_.names.of(rank), ": ", reason_of(silence_ms_));
  fail(XD_ERROR_PEER_LOST, ranks_.names.of(rank), " has gone while the ranks were connecting");
}

}  // namespace xd
