#include "mesh/connector.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <numeric>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/math.h"
#include "base/poll_list.h"
#include "base/rank_list.h"
#include "mesh/packet.h"

namespace xd {
namespace {

constexpr int kRedialMs = 5;             // a listener that had no room
constexpr std::size_t kSpareCalls = 64;  // connections beyond those that the ranks need

[[noreturn]] void fail_gone(std::uint64_t rank) {
  fail(XD_ERROR_PEER_LOST, "rank ", rank, " has gone while the ranks were connecting");
}

}  // namespace

MeshConnector::MeshConnector(int rank, std::span<const Introduction> introductions,
                             const PeerProcesses& processes, UniqueFd listener,
                             DescriptorReserve reserve)
    : rank_(rank),
      introductions_(introductions),
      processes_(processes),
      secret_(mesh_secret(introductions)),
      listener_(std::move(listener)),
      reserve_(std::move(reserve)),
      to_dial_(at(rank)),
      links_(introductions.size()),
      closed_(introductions.size()) {
  std::iota(to_dial_.begin(), to_dial_.end(), 0);
}

std::vector<UniqueFd> MeshConnector::run(const Deadline& deadline) {
  try {
    connect(deadline);
    return std::move(links_);
  } catch (const Error& error) {
    // Every rank notices and names a peer that is gone.
    if (error.status() != XD_ERROR_PEER_LOST) tell_failure(links_);
    give_up();
    throw;
  } catch (...) {
    tell_failure(links_);
    give_up();
    throw;
  }
}

void MeshConnector::give_up() noexcept {
  try {
    for (const int rank : to_dial_) {
      if (connected(rank)) continue;
      const UniqueFd fd = connect_link(introductions_[at(rank)].socket_name);
      if (fd) send_packet(fd.get(), Handshake(Side::client, secret_, at(rank_)).take_output());
    }
  } catch (...) {
  }
}

void MeshConnector::connect(const Deadline& deadline) {
  Interruption interruption;
  while (true) {
    dial();
    const std::vector<int> absent = missing();
    if (absent.empty()) return;
    if (deadline.passed())
      fail(XD_ERROR_TIMEOUT, rank_list(absent), " did not connect to rank ", rank_, " in time");
    interruption.check();
    wait(interruption.next(deadline));
  }
}

std::vector<int> MeshConnector::missing() const {
  std::vector<int> result;
  for (int r = 0; r < static_cast<int>(links_.size()); ++r)
    if (r != rank_ && !connected(r)) result.push_back(r);
  return result;
}

// Makes room for one more connection; descriptors for later ones stay reserved.
void MeshConnector::open_one() {
  const auto taken = static_cast<std::size_t>(std::ranges::count_if(
                         links_, [](const UniqueFd& link) { return static_cast<bool>(link); })) +
                     calls_.size() + 1;  // the next call
  reserve_.shrink_to(links_.size() - 1 - std::min(taken, links_.size() - 1));
}

void MeshConnector::dial() {
  std::erase_if(to_dial_, [this](int rank) {
    open_one();
    UniqueFd fd = connect_link(introductions_[at(rank)].socket_name);
    if (!fd && errno == EAGAIN) return false;
    // Every rank listens before it introduces itself.
    if (!fd && errno == ECONNREFUSED) fail_gone(at(rank));
    if (!fd) fail_errno(concat("connect to rank ", rank), errno);
    if (!peer_has_our_user(fd.get()))
      fail(XD_ERROR_MISMATCH, "rank ", rank, " runs as another user than rank ", rank_);
    calls_.push_back(std::make_unique<Call>(
        Call{std::move(fd), Handshake(Side::client, secret_, at(rank_)), rank}));
    advance(*calls_.back());
    return true;
  });
}

void MeshConnector::wait(const Deadline& deadline) {
  PollList items;
  std::vector<int> of_call, of_process, of_link;
  const int of_listener = items.add(listener_.get(), POLLIN);
  for (const auto& call : calls_) of_call.push_back(items.add(call->fd.get(), POLLIN));
  for (const PeerProcess& process : processes_.processes)
    of_process.push_back(items.add(is_awaited(process) ? process.pidfd.get() : -1, POLLIN));
  // Messages of peers over finished links are read later; a peer that hangs up is noticed now.
  for (std::size_t r = 0; r < links_.size(); ++r)
    of_link.push_back(items.add(closed_[r] ? -1 : links_[r].get(), 0));

  const int patience =
      to_dial_.empty() ? deadline.remaining_ms() : std::min(kRedialMs, deadline.remaining_ms());
  if (items.wait(patience) < 0) {
    if (errno != EINTR) fail_errno("poll", errno);
    return;
  }
  for (std::size_t i = 0; i < of_call.size(); ++i)
    if (items.has_news(of_call[i])) read(*calls_[i]);
  for (std::size_t p = 0; p < of_process.size(); ++p)
    if (items.has_news(of_process[p]) && is_awaited(processes_.processes[p]))
      fail(XD_ERROR_PEER_LOST, rank_list(processes_.processes[p].ranks),
           ": the process ended while the ranks were connecting");
  for (std::size_t r = 0; r < links_.size(); ++r)
    if (items.has_news(of_link[r])) check_link(static_cast<int>(r));
  std::erase_if(calls_, [](const auto& call) { return !call->fd; });
  if (items.has_news(of_listener)) accept();
}

void MeshConnector::accept() {
  open_one();
  UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd) {
    if (errno == EMFILE || errno == ENFILE) fail_errno("accept of a peer's connection", errno);
    return;
  }
  if (!peer_has_our_user(fd.get())) return warn("it comes from another user");
  if (calls_.size() >= links_.size() + kSpareCalls)
    return warn(concat(calls_.size(), " others have not said who they are"));
  calls_.push_back(
      std::make_unique<Call>(Call{std::move(fd), Handshake(Side::server, secret_, at(rank_)), -1}));
}

void MeshConnector::read(Call& call) {
  std::array<std::byte, sizeof(Hello)> buffer;
  const Packet packet = receive_packet(call.fd.get(), buffer);
  if (packet.kind == Packet::Kind::nothing_yet) return;
  if (packet.kind == Packet::Kind::end) return hung_up(call);
  // Each frame of the handshake is one packet.
  if (packet.kind == Packet::Kind::malformed || packet.fd ||
      packet.bytes.size() != call.handshake.wanted())
    return fail_or_drop(call, "does not speak this library's protocol");
  call.handshake.receive(packet.bytes);
  advance(call);
}

void MeshConnector::advance(Call& call) {
  const Bytes output = call.handshake.take_output();
  if (!output.empty() && send_packet(call.fd.get(), output) != Sent::done) return hung_up(call);
  if (call.handshake.refusal() != Refusal::none)
    return fail_or_drop(call, call.handshake.refusal_text());
  if (call.handshake.proven()) establish(call);
}

void MeshConnector::establish(Call& call) {
  const std::uint64_t sender = call.handshake.peer_sender();
  const bool valid =
      call.rank >= 0 ? sender == at(call.rank) : sender > at(rank_) && sender < links_.size();
  if (!valid) return fail_or_drop(call, concat("says it is rank ", sender));
  if (links_[sender]) return fail_or_drop(call, concat("is a second rank ", sender));
  links_[sender] = std::move(call.fd);
}

// A caller whose hello named our meeting knows the secret. So it is one of the ranks, and it has
// failed since.
void MeshConnector::hung_up(Call& call) {
  const bool called_here = call.rank < 0;
  if (called_here && !call.handshake.peer_greeted())
    return fail_or_drop(call, "closed the connection before it had said who it is");
  fail_gone(called_here ? call.handshake.peer_sender() : at(call.rank));
}

// A rank that was called must answer; a caller may be a stranger.
void MeshConnector::fail_or_drop(Call& call, const std::string& reason) {
  if (call.rank >= 0)
    fail(XD_ERROR_PEER_LOST, "rank ", call.rank, " is lost: what listens in its place ", reason);
  warn("it " + reason);
  call.fd.reset();
}

void MeshConnector::warn(const std::string& reason) {
  warnings_.warn(error_text("refused a connection to rank ", rank_, ": ", reason));
}

// Ranks that are connected may have done their work and left; the watch thread will report it.
bool MeshConnector::is_awaited(const PeerProcess& process) const {
  return std::any_of(process.ranks.begin(), process.ranks.end(),
                     [this](int r) { return !connected(r); });
}

void MeshConnector::check_link(int rank) {
  if (!has_packet(links_[at(rank)].get())) fail_gone(at(rank));
  closed_[at(rank)] = true;
}

}  // namespace xd
