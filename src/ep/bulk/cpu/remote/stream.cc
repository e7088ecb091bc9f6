#include "ep/bulk/cpu/remote/stream.h"

namespace xd::ep::cpu {

FarStream::FarStream(FarSide& side, FarKind kind) : side_(side), kind_(kind) {
  ways_.resize(at(side.routes().far_machines().back()) + 1);
}

std::byte* FarStream::add(int machine, std::size_t bytes) {
  Way& way = ways_[at(machine)];
  XD_CHECK(bytes <= side_.chunk_room());
  if (way.slot && way.used + bytes > side_.chunk_room()) close(machine, false);
  if (!way.slot) open(machine);
  std::byte* const item = FarSide::items_of(*way.slot) + way.used;
  way.used += bytes;
  ++way.items;
  return item;
}

void FarStream::finish() {
  for (const int machine : side_.routes().far_machines()) {
    if (!ways_[at(machine)].slot) open(machine);
    close(machine, true);
  }
}

void FarStream::open(int machine) {
  const int gateway = side_.routes().gateway(machine);
  Way& way = ways_[at(machine)];
  side_.wait(gateway, [&] {
    way.slot = side_.take_slot(gateway, FarSide::Lane::to_gateway);
    return way.slot.has_value();
  });
  way.used = 0;
  way.items = 0;
}

void FarStream::close(int machine, bool last) {
  Way& way = ways_[at(machine)];
  ++way.chunks;
  side_.send(*way.slot, kind_, way.items, last ? way.chunks : 0, way.used);
  way.slot.reset();
  side_.poll();
}

}  // namespace xd::ep::cpu
