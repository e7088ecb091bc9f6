#include "ep/bulk/cpu/remote/stream.h"

namespace xd::ep::cpu {

RemoteStream::RemoteStream(RemoteSide& side, RemoteKind kind) : side_(side), kind_(kind) {
  ways_.resize(at(side.routes().remote_machines().back()) + 1);
}

std::byte* RemoteStream::add(int machine, std::size_t bytes) {
  Way& way = ways_[at(machine)];
  XD_CHECK(bytes <= side_.chunk_room());
  if (way.frame && way.used + bytes > side_.chunk_room()) close(machine, false);
  if (!way.frame) open(machine);
  std::byte* const item = RemoteSide::items_of(*way.frame) + way.used;
  way.used += bytes;
  ++way.items;
  return item;
}

void RemoteStream::finish() {
  for (const int machine : side_.routes().remote_machines()) {
    if (!ways_[at(machine)].frame) open(machine);
    close(machine, true);
  }
}

void RemoteStream::open(int machine) {
  const int relay = side_.routes().relay(machine);
  Way& way = ways_[at(machine)];
  side_.wait(relay, [&] {
    way.frame = side_.take_frame(relay, RemoteSide::Direction::to_relay);
    return way.frame.has_value();
  });
  way.used = 0;
  way.items = 0;
}

void RemoteStream::close(int machine, bool last) {
  Way& way = ways_[at(machine)];
  ++way.chunks;
  side_.send(*way.frame, kind_, way.items, last ? way.chunks : 0, way.used);
  way.frame.reset();
  side_.poll();
}

}  // namespace xd::ep::cpu
