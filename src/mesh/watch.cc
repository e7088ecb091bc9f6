#include "mesh/watch.h"

#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/math.h"

namespace xd {

MeshWatch::MeshWatch(const Sources& sources)
    : from_(sources),
      states_(sources.links.size()),
      ended_(sources.processes.processes.size()),
      aborted_(sources.links.size()),
      place_of_rank_(sources.links.size()),
      place_of_process_(sources.processes.processes.size()),
      buffer_(kMaxMeshPacket) {
  sources_.reserve(1 + states_.size() + ended_.size());
  lost_.reserve(states_.size());
}

void MeshWatch::run(int stop_fd) {
  while (!stopped_) wait_and_serve(stop_fd);
}

// Links are never closed here, since other threads send over them; a peer that is gone is not
// polled again.
int MeshWatch::list_sources(int stop_fd) {
  sources_.clear();
  for (int r = 0; r < static_cast<int>(states_.size()); ++r)
    place_of_rank_[at(r)] = sources_.add(is_heard(r) ? from_.links[at(r)].get() : -1, POLLIN);
  const auto& processes = from_.processes.processes;
  for (std::size_t p = 0; p < processes.size(); ++p)
    place_of_process_[p] = sources_.add(ended_[p] ? -1 : processes[p].pidfd.get(), POLLIN);
  return sources_.add(stop_fd, POLLIN);
}

void MeshWatch::wait_and_serve(int stop_fd) {
  const int stop = list_sources(stop_fd);
  const int tick_ms = from_.events.tick_ms();
  if (sources_.wait(tick_ms) < 0) {
    if (errno != EINTR) fail_errno("poll", errno);
    return;
  }
  if (tick_ms >= 0) from_.events.on_tick();
  stopped_ = sources_.has_news(stop);
  for (int r = 0; r < static_cast<int>(states_.size()); ++r)
    if (sources_.has_news(place_of_rank_[at(r)]) && drain(r)) lose(r);
  for (std::size_t p = 0; p < ended_.size(); ++p) {
    if (!sources_.has_news(place_of_process_[p]) || ended_[p]) continue;
    const int first = from_.processes.processes[p].ranks.front();
    drain(first);
    lose(first);
  }
}

bool MeshWatch::is_here(int rank) const {
  return rank != from_.rank && states_[at(rank)] == State::here;
}

bool MeshWatch::is_heard(int rank) const {
  return is_here(rank) || states_[at(rank)] == State::failed;
}

// Handles all that has arrived from a rank, in order. True = nothing more can be expected of it.
bool MeshWatch::drain(int rank) {
  while (is_heard(rank)) {
    Packet packet = receive_packet(from_.links[at(rank)].get(), buffer_);
    const Packet::Kind kind = packet.kind;
    if (kind == Packet::Kind::nothing_yet) return false;
    if (kind == Packet::Kind::end) return true;
    if (kind == Packet::Kind::data && handle(rank, std::move(packet))) continue;
    log_warning("rank ", from_.rank, " gives up rank ", rank, ": it sent a malformed message");
    return true;
  }
  return false;
}

// False = malformed.
bool MeshWatch::handle(int rank, Packet packet) {
  const auto message = decode_mesh_packet(packet.bytes, packet.fd || packet.fd_discarded);
  if (!message) return false;
  switch (message->header.type) {
    case MeshMessageType::exchange:
      return from_.inbox.deliver(rank, message->header.round,
                                 {Bytes(message->blob.begin(), message->blob.end()),
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
      from_.inbox.mark_failed(
          rank, {reinterpret_cast<const char*>(message->blob.data()), message->blob.size()});
      return true;
    case MeshMessageType::abort:
      if (!aborted_[at(rank)]) from_.events.on_abort(rank);
      aborted_[at(rank)] = true;
      from_.inbox.mark_aborted(rank);
      return true;
  }
  return false;
}

// `rank` has been drained and has ended, and all ranks of its process with it. Messages that those
// had sent before count, goodbyes included.
void MeshWatch::lose(int rank) {
  const auto process = at(from_.processes.of_rank[at(rank)]);
  ended_[process] = true;
  lost_.clear();
  for (const int other : from_.processes.processes[process].ranks) {
    if (other != rank) drain(other);
    if (is_heard(other) && !is_here(other)) states_[at(other)] = State::left;
    if (!is_here(other)) continue;
    states_[at(other)] = State::lost;
    lost_.push_back(other);
  }
  if (lost_.empty()) return;
  from_.events.on_lost(lost_);
  from_.inbox.mark_lost(lost_);
}

}  // namespace xd
