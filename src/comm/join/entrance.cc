#include "comm/join/entrance.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "base/pidfd.h"
#include "meet/packet.h"

namespace xd {
namespace {

constexpr int kDialAgainMs = 5;  // a door with a full queue

}  // namespace

Entrance::Entrance(const Tag& door, const Secret& secret, std::string whose,
                   const Deadline& deadline)
    : whose_(std::move(whose)), deadline_(deadline), buffer_(kMaxMeshPacket) {
  while (!(fd_ = connect_link(door))) {
    const int error = errno;
    if (error == ECONNREFUSED) fail_gone();
    if (error != EAGAIN) fail_errno(concat("connect to ", whose_), error);
    if (deadline_.passed()) fail(XD_ERROR_TIMEOUT, whose_, " had no room for a connection in time");
    ::poll(nullptr, 0, kDialAgainMs);
    interruption_.check();
  }
  if (!peer_has_our_user(fd_.get()))
    fail(XD_ERROR_MISMATCH, whose_, " runs as another user than this process");
  pid_ = peer_process(fd_.get());
  pidfd_ = open_pidfd(pid_);
  if (!pidfd_ && errno == ESRCH) fail_gone();
  prove(secret);
}

Entrance::~Entrance() {
  if (!fd_ || !is_proven_) return;
  const Question withdrawal{.ask = Ask::withdraw};
  send_packet(fd_.get(), std::as_bytes(std::span(&withdrawal, 1)));
}

UniqueFd Entrance::duplicate() const {
  UniqueFd second(::fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
  if (!second) fail_errno(concat("duplicate of the connection to ", whose_), errno);
  return second;
}

void Entrance::prove(const Secret& secret) {
  Handshake handshake(Side::client, secret);
  while (true) {
    if (const Bytes output = handshake.take_output(); !output.empty()) send(output);
    if (handshake.proven()) break;
    if (handshake.refusal() != Refusal::none)
      fail(XD_ERROR_MISMATCH, whose_, " ", handshake.refusal_text());
    const Packet packet = receive_packet(fd_.get(), buffer_);
    if (packet.kind == Packet::Kind::nothing_yet) {
      wait(POLLIN, " has not answered");
    } else if (packet.kind != Packet::Kind::data) {
      fail_gone();
    } else if (packet.bytes.size() != handshake.wanted()) {
      fail(XD_ERROR_MISMATCH, whose_, " does not speak this library's protocol");
    } else {
      handshake.receive(packet.bytes);
    }
  }
  is_proven_ = true;
}

Entrance::Answer Entrance::ask(const Question& question, std::span<const std::byte> more,
                               const std::string& waits_for) {
  send(std::as_bytes(std::span(&question, 1)), more);
  return receive(waits_for.empty() ? " has not answered" : waits_for);
}

std::shared_ptr<Segment> Entrance::ask_memory(const Question& question, const SegmentMaker& maker) {
  Answer answer = ask(question);
  if (answer.reply.number == 0) return nullptr;
  if (!answer.fd) fail_errno("descriptor of shared memory", EMFILE);
  return maker.open(question.rank, answer.more, std::move(answer.fd));
}

void Entrance::send(std::span<const std::byte> head, std::span<const std::byte> body) {
  while (true) {
    const Sent sent = send_packet(fd_.get(), head, body);
    if (sent == Sent::done) return;
    if (sent == Sent::closed) fail_gone();
    if (sent == Sent::refused) fail_errno(concat("send to ", whose_), errno);
    wait(POLLOUT, " does not read");
  }
}

Entrance::Answer Entrance::receive(const std::string& waits_for) {
  while (true) {
    Packet packet = receive_packet(fd_.get(), buffer_);
    if (packet.kind == Packet::Kind::nothing_yet) {
      wait(POLLIN, waits_for);
      continue;
    }
    if (packet.kind != Packet::Kind::data || packet.bytes.size() < sizeof(Reply)) fail_gone();
    if (packet.fd_discarded) fail_errno("descriptor of shared memory", EMFILE);
    Answer answer{.reply = {}, .more = {}, .fd = std::move(packet.fd)};
    std::memcpy(static_cast<void*>(&answer.reply), packet.bytes.data(), sizeof(Reply));
    const auto more = packet.bytes.subspan(sizeof(Reply));
    answer.more.assign(more.begin(), more.end());
    const std::int32_t status = answer.reply.status;
    if (status == XD_SUCCESS) return answer;
    const bool is_known = status > XD_SUCCESS && status <= XD_ERROR_INTERNAL;
    throw Error(is_known ? static_cast<xd_status>(status) : XD_ERROR_INTERNAL,
                std::string(reinterpret_cast<const char*>(answer.more.data()), answer.more.size()));
  }
}

void Entrance::wait(short events, const std::string& waits_for) {
  interruption_.check();
  if (deadline_.passed()) fail(XD_ERROR_TIMEOUT, whose_, waits_for, " in time");
  std::array<pollfd, 2> items{pollfd{fd_.get(), events, 0}, pollfd{pidfd_.get(), POLLIN, 0}};
  ::poll(items.data(), items.size(), interruption_.next(deadline_).remaining_ms());
  if (items[0].revents == 0 && items[1].revents != 0) fail_gone();
}

void Entrance::fail_gone() const {
  fail(XD_ERROR_PEER_LOST, whose_,
       " has ended or has hung up while this process was joining: it may try again");
}

}  // namespace xd
