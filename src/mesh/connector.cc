#include "mesh/connector.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/math.h"
#include "base/poll_list.h"
#include "base/tcp.h"
#include "mesh/packet.h"
#include "mesh/several_hosts.h"

namespace xd {
namespace {

constexpr int kRedialMs = 5;             // a listener that had no room
constexpr int kRedialFarMs = 100;        // another host that could not be reached
constexpr std::size_t kSpareCalls = 64;  // connections beyond those that the ranks need
// The time that a caller from another host has to prove the secret, and the time that a rank that
// gives up takes to tell other hosts.
constexpr int kCallerMs = 5000;
constexpr int kFarewellMs = 500;

}  // namespace

MeshConnector::MeshConnector(const MetRanks& ranks, MeshListeners listeners,
                             DescriptorReserve reserve, int silence_ms)
    : ranks_(ranks),
      rank_(ranks.rank()),
      listeners_(std::move(listeners)),
      reserve_(std::move(reserve)),
      silence_ms_(silence_ms),
      reach_by_(at(ranks.num_ranks()), Deadline::after_ms(silence_ms)),
      dial_again_(Deadline::after_ms(0)),
      links_(at(ranks.num_ranks())),
      closed_(at(ranks.num_ranks())) {
  for (int r = 0; r < rank_; ++r)
    if (ranks_.rails.is_linked(r)) to_dial_.push_back(r);
}

std::vector<MeshLink> MeshConnector::run(const Deadline& deadline) {
  try {
    connect(deadline);
    return std::move(links_);
  } catch (const Error& error) {
    // Every rank notices and names a peer that is gone.
    if (error.status() != XD_ERROR_PEER_LOST) tell_failure(links_, rank_);
    give_up();
    throw;
  } catch (...) {
    tell_failure(links_, rank_);
    give_up();
    throw;
  }
}

void MeshConnector::give_up() noexcept {
  try {
    std::vector<int> far;
    for (const int rank : to_dial_) {
      if (connected(rank)) continue;
      if (ranks_.rails.is_near(rank)) {
        const UniqueFd fd = connect_link(ranks_.introductions[at(rank)].socket_name);
        if (fd)
          send_packet(fd.get(), Handshake(Side::client, ranks_.secret, at(rank_)).take_output());
      } else {
        far.push_back(rank);
      }
    }
    if (!far.empty()) hang_up_on(far);
  } catch (...) {
  }
}

void MeshConnector::hang_up_on(std::span<const int> ranks) const {
  PollList items;
  std::vector<UniqueFd> calls;
  std::vector<int> places;
  const TcpAddress here = control_address(ranks_.introductions[at(rank_)]);
  for (const int rank : ranks) {
    calls.push_back(tcp_begin_connect(control_address(ranks_.introductions[at(rank)]), &here));
    places.push_back(items.add(calls.back().get(), POLLOUT));
  }
  const Deadline deadline = Deadline::after_ms(kFarewellMs);
  std::vector<bool> told(calls.size());
  while (std::ranges::count(told, false) > 0 && !deadline.passed()) {
    if (items.wait(deadline.remaining_ms()) <= 0) return;
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (told[i] || !items.has_news(places[i])) continue;
      std::size_t sent = 0;
      send_some(calls[i].get(), Handshake(Side::client, ranks_.secret, at(rank_)).take_output(),
                sent);
      told[i] = true;
    }
    items.clear();
    for (std::size_t i = 0; i < calls.size(); ++i)
      places[i] = told[i] ? -1 : items.add(calls[i].get(), POLLOUT);
  }
}

void MeshConnector::connect(const Deadline& deadline) {
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

// Makes room for one more connection; descriptors for later ones stay reserved.
void MeshConnector::open_one() {
  const auto taken = static_cast<std::size_t>(std::ranges::count_if(
                         links_, [](const MeshLink& link) { return static_cast<bool>(link); })) +
                     calls_.size() + 1;  // the next call
  reserve_.shrink_to(links_.size() - 1 - std::min(taken, links_.size() - 1));
}

void MeshConnector::dial() {
  const bool again = dial_again_.passed();
  std::erase_if(to_dial_, [&](int rank) {
    return ranks_.rails.is_near(rank) ? dial_near(rank) : again && dial_far(rank);
  });
}

// False = later.
bool MeshConnector::dial_near(int rank) {
  open_one();
  UniqueFd fd = connect_link(ranks_.introductions[at(rank)].socket_name);
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

bool MeshConnector::dial_far(int rank) {
  open_one();
  // The peer checks that the connection comes from the address that this rank has named.
  const TcpAddress here = control_address(ranks_.introductions[at(rank_)]);
  UniqueFd fd = tcp_begin_connect(control_address(ranks_.introductions[at(rank)]), &here);
  if (!fd) {
    if (errno == EMFILE || errno == ENFILE) fail_errno("socket", errno);
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
    cannot_reach(call.rank, error);
    to_dial_.push_back(call.rank);
    return;
  }
  set_silence(call.fd.get(), silence_ms_);
  reach_by_[at(call.rank)] = Deadline::after_ms(silence_ms_);
  advance(call);
}

// Every rank listens before it introduces itself, and until all are connected.
void MeshConnector::cannot_reach(int rank, int error) {
  const auto& introductions = ranks_.introductions;
  const std::string address = control_address(introductions[at(rank)]).text();
  if (error == ECONNREFUSED)
    fail(XD_ERROR_PEER_LOST, ranks_.names.of(rank),
         " has gone while the ranks were connecting, or a firewall refuses ", address);
  dial_again_ = Deadline::after_ms(kRedialFarMs);
  if (silence_ms_ <= 0 || !reach_by_[at(rank)].passed()) return;
  fail(XD_ERROR_TIMEOUT, ranks_.names.of(rank_), " cannot reach ", ranks_.names.of(rank), " at ",
       address, " from ", control_address(introductions[at(rank_)]).host(), " within ", silence_ms_,
       " ms: ", std::strerror(error), " (errno ", error, ")");
}

void MeshConnector::wait(const Deadline& deadline) {
  PollList items;
  std::vector<int> of_call, of_process, of_link;
  const int of_near = items.add(listeners_.near.get(), POLLIN);
  const int of_far = items.add(listeners_.far.get(), POLLIN);
  for (const auto& call : calls_)
    of_call.push_back(items.add(call->fd.get(), call->is_connecting ? POLLOUT : POLLIN));
  for (const PeerProcess& process : ranks_.processes.processes)
    of_process.push_back(items.add(is_awaited(process) ? process.pidfd.get() : -1, POLLIN));
  // Messages of peers over finished links are read later; a peer that hangs up is noticed now.
  for (std::size_t r = 0; r < links_.size(); ++r) {
    const short hang_up = links_[r].is_tcp() ? POLLRDHUP : 0;
    of_link.push_back(items.add(closed_[r] ? -1 : links_[r].get(), hang_up));
  }

  if (items.wait(next_look(deadline).remaining_ms()) < 0) {
    if (errno != EINTR) fail_errno("poll", errno);
    return;
  }
  for (std::size_t i = 0; i < of_call.size(); ++i) {
    Call& call = *calls_[i];
    if (!items.has_news(of_call[i])) {
      // This process may have stood still itself, so what has come is looked at first.
      if (call.is_connecting && silence_ms_ > 0 && reach_by_[at(call.rank)].passed())
        cannot_reach(call.rank, ETIMEDOUT);
      continue;
    }
    if (call.is_connecting)
      answered(call);
    else
      read(call);
  }
  for (std::size_t p = 0; p < of_process.size(); ++p)
    if (items.has_news(of_process[p]) && is_awaited(ranks_.processes.processes[p]))
      fail(XD_ERROR_PEER_LOST, ranks_.names.of(ranks_.processes.processes[p].ranks),
           ": the process ended while the ranks were connecting");
  for (std::size_t r = 0; r < links_.size(); ++r)
    if (items.has_news(of_link[r])) check_link(static_cast<int>(r));
  close_overdue_callers();
  std::erase_if(calls_, [](const auto& call) { return !call->fd; });
  if (items.has_news(of_near)) accept(listeners_.near.get(), false);
  if (items.has_news(of_far)) accept(listeners_.far.get(), true);
}

// The time at which there is something to do even if nothing happens.
Deadline MeshConnector::next_look(const Deadline& deadline) const {
  auto when = deadline.when();
  for (const int rank : to_dial_) {
    const bool near = ranks_.rails.is_near(rank);
    when = std::min(when, (near ? Deadline::after_ms(kRedialMs) : dial_again_).when());
  }
  for (const auto& call : calls_) {
    if (call->is_connecting && silence_ms_ > 0)
      when = std::min(when, reach_by_[at(call->rank)].when());
    if (call->rank < 0 && call->over_tcp) when = std::min(when, call->limit.when());
  }
  return Deadline(when);
}

void MeshConnector::accept(int listener, bool over_tcp) {
  open_one();
  UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd) {
    const int error = errno;
    const bool exhausted = error == EMFILE || error == ENFILE;
    if (exhausted && !send_stranger_away()) fail_errno("accept of a peer's connection", error);
    return;
  }
  if (!over_tcp && !peer_has_our_user(fd.get())) return warn("it comes from another user");
  const bool has_room = calls_.size() < links_.size() + kSpareCalls;
  if (!has_room && !(over_tcp && send_stranger_away()))
    return warn(concat(calls_.size(), " others have not said who they are"));
  calls_.push_back(
      std::make_unique<Call>(Call{std::move(fd), Handshake(Side::server, ranks_.secret, at(rank_)),
                                  -1, over_tcp, false, Deadline::after_ms(kCallerMs)}));
}

// Anybody may call over TCP. A rank says who it is at once, and calls again if it was not heard; so
// the oldest caller over TCP that has said nothing goes first. False = there is none.
bool MeshConnector::send_stranger_away() {
  const auto silent = std::ranges::find_if(calls_, [](const auto& call) {
    return call->over_tcp && call->rank < 0 && !call->handshake.peer_greeted();
  });
  if (silent == calls_.end()) return false;
  warn("it had not said who it is when its room was needed");
  calls_.erase(silent);
  return true;
}

void MeshConnector::close_overdue_callers() {
  for (const auto& call : calls_) {
    if (!call->fd || call->rank >= 0 || !call->over_tcp || !call->limit.passed()) continue;
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
  const bool valid = call.rank >= 0 ? rank == call.rank
                                    : rank > rank_ && at(rank) < links_.size() &&
                                          ranks_.rails.is_linked(rank) &&
                                          ranks_.rails.is_near(rank) != call.over_tcp;
  if (!valid) return fail_or_drop(call, concat("says it is rank ", sender));
  if (connected(rank)) return fail_or_drop(call, concat("is a second rank ", sender));
  if (call.over_tcp) check_route(call, rank);
  if (call.over_tcp && call.rank < 0) set_silence(call.fd.get(), silence_ms_);
  links_[at(rank)] =
      call.over_tcp ? MeshLink::over_tcp(std::move(call.fd)) : MeshLink(std::move(call.fd));
}

// Other connections than these will go to the addresses that the ranks have named.
void MeshConnector::check_route(const Call& call, int rank) const {
  const std::string named = control_address(ranks_.introductions[at(rank)]).host();
  const std::string seen = peer_address(call.fd.get()).host();
  if (seen == named) return;
  fail(XD_ERROR_MISMATCH, ranks_.names.of(rank), " has the address ", named, " and reaches ",
       ranks_.names.of(rank_), " from ", seen,
       ", expected the same: addresses must not be translated between hosts (NAT)");
}

// A caller whose hello named our meeting knows the secret. So it is one of the ranks, and it has
// failed since. A rank that was called over TCP may have had no room for this caller.
void MeshConnector::hung_up(Call& call) {
  const bool called_here = call.rank < 0;
  if (called_here && !call.handshake.peer_greeted())
    return fail_or_drop(call, "closed the connection before it had said who it is");
  if (called_here || !call.over_tcp)
    fail_gone(called_here ? static_cast<int>(call.handshake.peer_sender()) : call.rank);
  call.fd.reset();
  dial_again_ = Deadline::after_ms(kRedialFarMs);
  reach_by_[at(call.rank)] = Deadline::after_ms(silence_ms_);
  to_dial_.push_back(call.rank);
}

// A rank that was called must answer; a caller may be a stranger.
void MeshConnector::fail_or_drop(Call& call, const std::string& reason) {
  if (call.rank >= 0)
    fail(XD_ERROR_PEER_LOST, ranks_.names.of(call.rank), " is lost: what listens in its place ",
         reason);
  warn("it " + reason);
  call.fd.reset();
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
  // With several hosts this may be all that this rank hears of a peer elsewhere that has failed.
  if (ranks_.rails.num_hosts() > 1) fail_with_words_of(rank);
  if (!has_packet(links_[at(rank)].get())) fail_gone(rank);
  closed_[at(rank)] = true;
}

void MeshConnector::fail_with_words_of(int rank) {
  Bytes buffer(kMaxMeshPacket);
  Packet packet;
  while ((packet = links_[at(rank)].receive(buffer)).kind == Packet::Kind::data) {
    const auto message = decode_mesh_packet(packet.bytes, static_cast<bool>(packet.fd));
    if (!message || message->header.type != MeshMessageType::failure) continue;
    const std::string_view text(reinterpret_cast<const char*>(message->blob.data()),
                                message->blob.size());
    fail(XD_ERROR_MISMATCH, ranks_.names.of(rank), " failed: ", text);
  }
  fail_gone(rank);
}

void MeshConnector::fail_gone(int rank) const {
  fail(XD_ERROR_PEER_LOST, ranks_.names.of(rank), " has gone while the ranks were connecting");
}

}  // namespace xd
