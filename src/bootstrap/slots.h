// Slots of equal size that carry blobs through a foreign all-gather, which wants as many bytes from
// every rank.
#pragma once

#include <cstdint>
#include <vector>

#include "base/error.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/wire.h"

namespace xd {

inline constexpr std::size_t kSlotBytes = sizeof(std::uint64_t) + Bootstrap::kMaxBlob;

// A slot has a size, then the blob, then zeros.
inline Bytes make_slot(std::span<const std::byte> blob) {
  XD_CHECK(blob.size() <= Bootstrap::kMaxBlob);
  WireWriter slot;
  slot.put(std::uint64_t{blob.size()});
  slot.put_bytes(blob);
  Bytes bytes = slot.take();
  bytes.resize(kSlotBytes);
  return bytes;
}

// Reads the blobs out of the slots of all ranks, each as long as this rank's. `what` names the
// all-gather in errors.
inline std::vector<Bytes> read_slots(std::span<const std::byte> slots, int num_ranks,
                                     std::size_t blob_bytes, const char* what) {
  std::vector<Bytes> blobs;
  WireReader in(slots);
  for (int r = 0; r < num_ranks; ++r) {
    WireReader slot(in.take_bytes(kSlotBytes));
    const auto size = slot.take<std::uint64_t>();
    if (size != blob_bytes)
      fail(XD_ERROR_MISMATCH, what, " brought ", size, " bytes of rank ", r, ", expected ",
           blob_bytes, ": it mixes up calls, or rank ", r, " runs another version of the library");
    const auto bytes = slot.take_bytes(size);
    blobs.emplace_back(bytes.begin(), bytes.end());
  }
  return blobs;
}

}  // namespace xd
