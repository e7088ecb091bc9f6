#include "comm/mesh_watch.h"

#include <poll.h>

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
      buffer_(max_mesh_packet_bytes()) {}

void MeshWatch::run(int stop_fd) noexcept {
  try {
    while (!stopped_) wait_and_serve(stop_fd);
  } catch (const std::exception& error) {
    log_warning("rank ", from_.rank, " does not notice lost peers any more: ", error.what());
  }
}

// Links are never closed here, as other threads send over them; who is gone is not polled again.
void MeshWatch::wait_and_serve(int stop_fd) {
  std::vector<pollfd> items{{stop_fd, POLLIN, 0}};
  const int num_ranks = static_cast<int>(states_.size());
  for (int r = 0; r < num_ranks; ++r)
    items.push_back({is_here(r) ? from_.links[at(r)].get() : -1, POLLIN, 0});
  const auto& processes = from_.processes.processes;
  for (std::size_t p = 0; p < processes.size(); ++p)
    items.push_back({ended_[p] ? -1 : processes[p].pidfd.get(), POLLIN, 0});
  const int tick_ms = from_.events.tick_ms();
  if (::poll(items.data(), items.size(), tick_ms) < 0) {
    if (errno != EINTR) fail_errno("poll", errno);
    return;
  }
  if (tick_ms >= 0) from_.events.on_tick();
  stopped_ = items[0].revents != 0;
  for (int r = 0; r < num_ranks; ++r)
    if (items[1 + at(r)].revents != 0 && drain(r)) lose(r);
  for (std::size_t p = 0; p < processes.size(); ++p) {
    if (items[1 + states_.size() + p].revents == 0 || ended_[p]) continue;
    const int first = processes[p].ranks.front();
    drain(first);
    lose(first);
  }
}

bool MeshWatch::is_here(int rank) const {
  return rank != from_.rank && states_[at(rank)] == State::here;
}

// Handles all that has arrived from a rank, in order. True = nothing more can be expected of it.
bool MeshWatch::drain(int rank) {
  while (is_here(rank)) {
    Packet packet = receive_packet(from_.links[at(rank)].get(), buffer_);
    const Packet::Kind kind = packet.kind;
    if (kind == Packet::Kind::nothing_yet) return false;
    if (kind == Packet::Kind::end) return true;
    if (kind == Packet::Kind::data && handle(rank, std::move(packet))) continue;
    log_warning("rank ", from_.rank, " gives up rank ", rank,
                ": it sent a malformed message, or a descriptor that this process has no room for");
    return true;
  }
  return false;
}

// False = malformed.
bool MeshWatch::handle(int rank, Packet packet) {
  const auto message = decode_mesh_packet(packet.bytes, static_cast<bool>(packet.fd));
  if (!message) return false;
  switch (message->header.type) {
    case MeshMessageType::exchange:
      return from_.inbox.deliver(
          rank, message->header.round,
          {Bytes(message->blob.begin(), message->blob.end()), std::move(packet.fd)});
    case MeshMessageType::goodbye:
      states_[at(rank)] = State::left;
      from_.events.on_left(rank);
      from_.inbox.mark_left(rank);
      return true;
    case MeshMessageType::abort:
      if (!aborted_[at(rank)]) from_.events.on_abort(rank);
      aborted_[at(rank)] = true;
      from_.inbox.mark_aborted(rank);
      return true;
  }
  return false;
}

// `rank` has been drained and has ended, and all ranks of its process with it. What those had sent
// before counts, goodbyes included.
void MeshWatch::lose(int rank) {
  const auto process = at(from_.processes.of_rank[at(rank)]);
  ended_[process] = true;
  std::vector<int> lost;
  for (const int other : from_.processes.processes[process].ranks) {
    if (other != rank) drain(other);
    if (!is_here(other)) continue;
    states_[at(other)] = State::lost;
    lost.push_back(other);
  }
  if (lost.empty()) return;
  from_.events.on_lost(lost);
  from_.inbox.mark_lost(lost);
}

}  // namespace xd
