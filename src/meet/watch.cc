#include "meet/watch.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/tcp.h"

namespace xd {
namespace {

// The time until a post is tried again for which the system had no memory: its connection has room,
// so that is no news.
constexpr int kNoMemoryPauseMs = 20;

}  // namespace

MeshWatch::MeshWatch(const Sources& sources)
    : from_(sources),
      states_(sources.links.size()),
      ended_(sources.ranks.processes.processes.size()),
      aborted_(sources.links.size()),
      place_of_rank_(sources.links.size()),
      place_of_process_(sources.ranks.processes.processes.size()),
      buffer_(kMaxMeshPacket),
      posts_(sources.ranks.rails.num_hosts() > 1 ? sources.links.size() : 0) {
  sources_.reserve(1 + states_.size() + ended_.size());
  lost_.reserve(states_.size());
  // All ranks of one host are connected, but for those that were gone when this one joined them.
  if (sources.ranks.rails.num_hosts() > 1) return;
  for (std::size_t r = 0; r < states_.size(); ++r) {
    if (sources.links[r] || static_cast<int>(r) == sources.ranks.rank()) continue;
    states_[r] = State::lost;
    ended_[at(sources.ranks.processes.of_rank[r])] = true;
  }
}

void MeshWatch::run(int wake, const std::atomic<bool>& leaving) {
  while (!stopped_) wait_and_serve(wake, leaving);
}

// Links are never closed here, since other threads send over them; a peer that is gone is not
// polled again.
int MeshWatch::list_sources(int wake) {
  sources_.clear();
  for (int r = 0; r < static_cast<int>(states_.size()); ++r) {
    const MeshLink& link = from_.links[at(r)];
    if (!is_heard(r)) forget_posts(r);
    const bool posts = !posts_.empty() && !posts_[at(r)].empty();
    const bool sends = !short_of_memory_ && (link.has_unsent() || posts);
    place_of_rank_[at(r)] = sources_.add(is_heard(r) ? link.get() : -1,
                                         static_cast<short>(sends ? POLLIN | POLLOUT : POLLIN));
  }
  const auto& processes = from_.ranks.processes.processes;
  for (std::size_t p = 0; p < processes.size(); ++p)
    place_of_process_[p] = sources_.add(ended_[p] ? -1 : processes[p].pidfd.get(), POLLIN);
  return sources_.add(wake, POLLIN);
}

void MeshWatch::wait_and_serve(int wake, const std::atomic<bool>& leaving) {
  const int woken = list_sources(wake);
  const int tick_ms = from_.events.tick_ms();
  const bool short_of_memory = std::exchange(short_of_memory_, false);
  const int pause_ms = tick_ms < 0 ? kNoMemoryPauseMs : std::min(tick_ms, kNoMemoryPauseMs);
  if (sources_.wait(short_of_memory ? pause_ms : tick_ms) < 0) {
    if (errno != EINTR) fail_errno("poll", errno);
    return;
  }
  if (tick_ms >= 0) from_.events.on_tick();
  if (sources_.has_news(woken)) {
    // Acquire, by the descriptor: what was set before the call is seen after it.
    eventfd_t calls = 0;
    ::eventfd_read(wake, &calls);
    stopped_ = leaving.load(std::memory_order_acquire);
  }
  for (int r = 0; r < static_cast<int>(states_.size()); ++r) {
    if (short_of_memory && is_heard(r)) send_posts(r);
    if (!sources_.has_news(place_of_rank_[at(r)])) continue;
    send_posts(r);
    const End end = drain(r);
    // Without a bound the system gives a connection up itself at last; that says nothing of others.
    const bool silent = end == End::silent && from_.silence_ms > 0;
    if (end != End::none) lose(r, silent ? from_.silence_ms : 0);
  }
  for (std::size_t p = 0; p < ended_.size(); ++p) {
    if (!sources_.has_news(place_of_process_[p]) || ended_[p]) continue;
    const int first = from_.ranks.processes.processes[p].ranks.front();
    drain(first);
    lose(first, 0);
  }
}

bool MeshWatch::is_here(int rank) const {
  return rank != from_.ranks.rank() && states_[at(rank)] == State::here;
}

bool MeshWatch::is_heard(int rank) const {
  return is_here(rank) || states_[at(rank)] == State::failed;
}

// Handles all that has arrived from a rank, in order. Any end = nothing more can be expected of it.
MeshWatch::End MeshWatch::drain(int rank) {
  while (is_heard(rank) && is_connected(rank)) {
    Packet packet = from_.links[at(rank)].receive(buffer_);
    const Packet::Kind kind = packet.kind;
    if (kind == Packet::Kind::nothing_yet) return End::none;
    if (kind == Packet::Kind::end) return packet.silent ? End::silent : End::closed;
    if (kind == Packet::Kind::data && handle(rank, std::move(packet))) continue;
    log_warning(from_.ranks.names.of(from_.ranks.rank()), " gives up ", from_.ranks.names.of(rank),
                ": it sent a malformed message");
    return End::closed;
  }
  return End::none;
}

// Tells whether a message may come from the connected rank `from`: its own, or one that it passes
// on as a relay. Of a loss ranks hear from ranks of their own host if the lost is on another, and
// else from ranks of the host of the lost.
bool MeshWatch::may_say(int from, const MeshHeader& header) const {
  const Rails& rails = from_.ranks.rails;
  const int rank = header.source;
  if (rank >= rails.num_ranks() || rank == rails.rank()) return false;
  if (header.type != MeshMessageType::lost) return rails.source_of(rank) == from;
  if (rails.is_near(from)) return !rails.is_near(rank);
  return rails.host_of(rank) == rails.host_of(from) && header.round == 0;
}

// False = malformed. Then it is not passed on either.
bool MeshWatch::handle(int from, Packet packet) {
  const auto message = decode_mesh_packet(packet.bytes, packet.fd || packet.fd_discarded);
  if (!message || !may_say(from, message->header)) return false;
  if (message->header.type == MeshMessageType::lost) {
    lose(message->header.source, static_cast<int>(message->header.round));
    return true;
  }
  const bool is_letter = message->header.type == MeshMessageType::exchange;
  if (is_letter && !from_.inbox.expects(message->header.source, message->header.round))
    return false;
  // This comes first: this rank may leave as soon as it has the letter itself.
  pass_on(message->header.source, packet.bytes);
  return take(*message, std::move(packet));
}

bool MeshWatch::take(const MeshMessage& message, Packet packet) {
  const int rank = message.header.source;
  switch (message.header.type) {
    case MeshMessageType::exchange:
      return from_.inbox.deliver(rank, message.header.round,
                                 {Bytes(message.blob.begin(), message.blob.end()),
                                  std::move(packet.fd), packet.fd_discarded});
    case MeshMessageType::goodbye:
      if (is_here(rank)) from_.events.on_left(rank);
      states_[at(rank)] = State::left;
      from_.inbox.mark_left(rank);
      return true;
    case MeshMessageType::failure:
      if (!is_here(rank)) return true;  // it has said goodbye before
      states_[at(rank)] = State::failed;
      from_.events.on_left(rank);
      from_.inbox.mark_failed(rank, status_after(message.header), message.text());
      return true;
    case MeshMessageType::abort:
      if (!aborted_[at(rank)]) from_.events.on_abort(rank);
      aborted_[at(rank)] = true;
      from_.inbox.mark_aborted(rank);
      return true;
    case MeshMessageType::report:
      from_.events.on_report(rank, message.blob);
      return true;
    case MeshMessageType::lost:
      break;
  }
  return false;
}

// `rank` has ended, and all ranks of its process with it, or of its host if that is silent.
// Messages that those had sent before count, goodbyes included.
void MeshWatch::lose(int rank, int silence_ms) {
  const Rails& rails = from_.ranks.rails;
  const auto process = at(from_.ranks.processes.of_rank[at(rank)]);
  const std::span<const int> all = silence_ms != 0 ? rails.ranks_of(rails.host_of(rank))
                                                   : from_.ranks.processes.processes[process].ranks;
  for (const int other : all) {
    ended_[at(from_.ranks.processes.of_rank[at(other)])] = true;
    if (other != rank) drain(other);  // which may tell of further losses
  }
  lost_.clear();
  for (const int other : all) {
    if (is_heard(other) && !is_here(other)) states_[at(other)] = State::left;
    if (!is_here(other)) continue;
    states_[at(other)] = State::lost;
    lost_.push_back(other);
  }
  if (lost_.empty()) return;
  const Loss loss{.ranks = lost_, .silence_ms = silence_ms};
  from_.events.on_lost(loss);
  from_.inbox.mark_lost(loss);
  spread_loss(rank, silence_ms);
}

// A relay passes on all that a rank says, in order.
void MeshWatch::pass_on(int rank, std::span<const std::byte> packet) {
  if (posts_.empty()) return;
  const std::vector<int> followers = from_.ranks.rails.followers_of(rank);
  if (followers.empty()) return;
  const auto copy = std::make_shared<const Bytes>(packet.begin(), packet.end());
  for (const int follower : followers) post(follower, copy);
}

// Each rank notices the loss of those that it is connected to. Other hosts may not: a fork of the
// lost process may hold its connection open, or their rank with the connection may be lost itself.
// So the first news of a loss on another host goes to this host, and of one here to the others; not
// the silence of a host, which others may still hear.
void MeshWatch::spread_loss(int rank, int silence_ms) {
  if (posts_.empty()) return;
  const Rails& rails = from_.ranks.rails;
  const MeshHeader header{MeshMessageType::lost, 0, static_cast<std::uint64_t>(silence_ms), rank};
  const auto bytes = bytes_of(header);
  const auto packet = std::make_shared<const Bytes>(bytes.begin(), bytes.end());
  for (int to = 0; to < rails.num_ranks(); ++to)
    if (rails.is_linked(to) && rails.is_near(to) != rails.is_near(rank)) post(to, packet);
}

void MeshWatch::post(int to, std::shared_ptr<const Bytes> packet) {
  if (!is_heard(to) || replace_post(to, packet)) return;
  posts_[at(to)].push_back(std::move(packet));
  waiting_posts_.fetch_add(1, std::memory_order_relaxed);
  send_posts(to);
}

// Takes the place of an older report about the same, so that those for a process that stands still
// do not pile up.
bool MeshWatch::replace_post(int to, const std::shared_ptr<const Bytes>& packet) {
  constexpr std::size_t kKey = sizeof(MeshHeader) + sizeof(std::uint64_t);
  MeshHeader header;
  std::memcpy(&header, packet->data(), sizeof(header));
  if (header.type != MeshMessageType::report || packet->size() < kKey) return false;
  for (auto& older : posts_[at(to)]) {
    if (older->size() != packet->size()) continue;
    if (std::memcmp(older->data(), packet->data(), kKey) != 0) continue;
    older = packet;
    return true;
  }
  return false;
}

// Sends what `to` has room for; the rest follows when there is room.
void MeshWatch::send_posts(int to) {
  const MeshLink& link = from_.links[at(to)];
  link.flush();
  if (posts_.empty()) return;
  auto& posts = posts_[at(to)];
  while (!posts.empty()) {
    const Sent sent = link.send(*posts.front());
    if (sent == Sent::full) return;
    if (sent == Sent::refused && is_passing(errno)) {
      short_of_memory_ = true;
      return;
    }
    posts.pop_front();
    // Release: a thread that sees none left and sends over the same link comes behind them.
    waiting_posts_.fetch_sub(1, std::memory_order_release);
  }
}

void MeshWatch::forget_posts(int to) {
  if (posts_.empty()) return;
  waiting_posts_.fetch_sub(static_cast<int>(posts_[at(to)].size()), std::memory_order_release);
  posts_[at(to)].clear();
}

}  // namespace xd
