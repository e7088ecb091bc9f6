// How a desk (ep/bulk/desk.h) deals its units out to warps of many blocks. Units are numbered from
// 0 in each operation. A unit has a place, and its items are dealt out in shares: share s has the
// items s, s + kShares and so on. A warp that takes a ticket does one share.
//
//   word       written by         means
//   number     the desk           of a place: its unit + 1 is here, and can be done at once
//   done       hands              of a place: how many shares of it are done
//   tickets    hands              the next one
//   over       the desk           there are no more units
//
// A place is used again when all shares of its unit are done. So a warp with a ticket of a unit
// that is here finds it there until the share is done, and never a later one.
#pragma once

#include <cstdint>

namespace xd::ep::cuda {

template <std::uint32_t kUnits, std::uint32_t kSharesOfUnit>
struct DealtUnits {
  static constexpr std::uint32_t kPlaces = kUnits, kShares = kSharesOfUnit;

  static constexpr std::uint32_t unit_of(std::uint32_t ticket) { return ticket / kShares; }
  static constexpr std::uint32_t share_of(std::uint32_t ticket) { return ticket % kShares; }
  static constexpr std::uint32_t place_of(std::uint32_t unit) { return unit % kPlaces; }
  static constexpr std::uint64_t number_of(std::uint32_t unit) { return std::uint64_t{unit} + 1; }
  // The last unit of a place that has had one, when so many have been handed on.
  static constexpr std::uint32_t last_in(std::uint32_t place, std::uint32_t handed_on) {
    return handed_on - 1 - (handed_on - 1 + kPlaces - place) % kPlaces;
  }
};

}  // namespace xd::ep::cuda
