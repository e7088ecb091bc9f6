// Chunks between a kernel and ranks on other machines, through the proxy (net/commands.h). A block
// at a time uses the lanes; what is said to be for one thread is for any thread of it.
//
//   memory                 written by                  read by
//   slots that are sent    this block, when it may     the proxy, after `filled`
//   slots that land        the network                 this block, after `landed`
//   FarState               this block; later kernels   this block
//
// All words are in pinned memory. `filled` and `read` are stored with release (sys) behind a
// barrier of the block, which covers the stores and loads of all its threads.
#pragma once

#include "cuda/ptx.cuh"
#include "ep/bulk/cuda/remote/params.h"

namespace xd::ep::cuda {

class FarLanes {
 public:
  __device__ explicit FarLanes(const FarDevice& far) : f_(far) {}

  // ---- To a partner ----

  // True if the next chunk may be written: its slot's last one has been read. One thread.
  __device__ bool may_fill(int partner, FarLane lane) const {
    const std::uint64_t n = f_.state->filled[partner][at(lane)];
    return net::use_of(ptx::ld_acquire_sys(f_.words.freed + slot(partner, lane, n))) ==
           uses_before(n);
  }
  // The chunk that fill() sends.
  __device__ FarHeader* next_out(int partner, FarLane lane) const {
    return chunk(false, partner, lane, f_.state->filled[partner][at(lane)]);
  }
  // Sends it. One thread, behind a barrier if others have written items.
  __device__ void fill(int partner, FarLane lane, std::uint32_t item_bytes) const {
    std::uint64_t& n = f_.state->filled[partner][at(lane)];
    const std::uint64_t word = net::slot_word(
        uses_before(n) + 1, static_cast<std::uint32_t>(sizeof(FarHeader)) + item_bytes);
    ptx::st_release_sys(f_.words.filled + slot(partner, lane, n), word);
    ++n;
  }
  // True if the partner has read all chunks of the lane.
  __device__ bool all_read(int partner, FarLane lane) const {
    const std::uint64_t n = f_.state->filled[partner][at(lane)];
    bool all = true;
    for (std::uint64_t next = n; next < n + kLaneSlots; ++next) {
      const std::uint64_t* freed = f_.words.freed + slot(partner, lane, next);
      all &= net::use_of(ptx::ld_acquire_sys(freed)) == uses_before(next);
    }
    return all;
  }

  // ---- From a partner ----

  // True if the lane's next chunk is here. One thread.
  __device__ bool landed(int partner, FarLane lane) const {
    const std::uint64_t n = f_.state->read[partner][at(lane)];
    return net::use_of(ptx::ld_acquire_sys(f_.words.landed + slot(partner, lane, n))) ==
           uses_before(n) + 1;
  }
  // Bytes of items of the chunk that is here; none if it is no chunk.
  __device__ std::uint32_t bytes_in(int partner, FarLane lane) const {
    const std::uint64_t n = f_.state->read[partner][at(lane)];
    const std::uint32_t bytes =
        net::bytes_of(ptx::ld_relaxed_sys(f_.words.landed + slot(partner, lane, n)));
    return bytes < sizeof(FarHeader) ? 0 : bytes - static_cast<std::uint32_t>(sizeof(FarHeader));
  }
  __device__ const FarHeader* next_in(int partner, FarLane lane) const {
    return chunk(true, partner, lane, f_.state->read[partner][at(lane)]);
  }
  // Gives it back. One thread, behind a barrier if others have read it.
  __device__ void give_back(int partner, FarLane lane) const {
    std::uint64_t& n = f_.state->read[partner][at(lane)];
    ptx::st_release_sys(f_.words.read + slot(partner, lane, n),
                        net::slot_word(uses_before(n) + 1, 0));
    ++n;
  }

 private:
  __device__ static constexpr int at(FarLane lane) { return static_cast<int>(lane); }
  __device__ static int slot(int partner, FarLane lane, std::uint64_t n) {
    return partner * kFarSlots + at(lane) * kLaneSlots + lane_slot_of(n);
  }
  __device__ FarHeader* chunk(bool incoming, int partner, FarLane lane, std::uint64_t n) const {
    const auto place = static_cast<unsigned>(slot(partner, lane, n) - partner * kFarSlots);
    return reinterpret_cast<FarHeader*>(f_.slots + f_.links.place(incoming, partner, place) +
                                        sizeof(net::LinkHeader));
  }

  const FarDevice& f_;
};

__device__ inline std::byte* items_of(FarHeader* chunk) {
  return reinterpret_cast<std::byte*>(chunk + 1);
}
__device__ inline const std::byte* items_of(const FarHeader* chunk) {
  return reinterpret_cast<const std::byte*>(chunk + 1);
}

}  // namespace xd::ep::cuda
