// Chunks between a kernel and ranks on other machines, through the proxy (net/commands.h). A block
// at a time sends chunks and gives them back: first the one that enters, at last the one that
// leaves last; what is said to be for one thread is for any thread of it.
//
//   memory                 written by                    read by
//   frames that are sent   that block, and hands of      the proxy, after `filled`
//                          others, when they may
//   frames that land       the network                   that block, after `landed`, and hands
//   RemoteState::sent,     that block; later kernels     that block
//     read
//
// All words are in pinned memory. `filled` and `read` are stored with release (sys). It covers the
// stores and loads of this block's threads behind its barrier, and those of hands (hands.cuh)
// behind their shares' `done`, which the storing lane, or one of its warp, has acquired.
#pragma once

#include "cuda/ptx.cuh"
#include "ep/bulk/cuda/remote/params.h"

namespace xd::ep::cuda {

class Directions {
 public:
  __device__ explicit Directions(const RemoteDevice& remote) : f_(remote) {}

  // ---- To a neighbour ----

  // True if a chunk may be written into the frame: its last one has been read.
  __device__ bool may_fill(int frame) const {
    return net::use_of(ptx::ld_acquire_sys(f_.words.freed + frame)) == f_.state->sent[frame];
  }
  __device__ RemoteHeader* chunk_out(int frame) const { return chunk(false, frame); }
  // Sends it. One thread, behind a barrier if others have written items.
  __device__ void send(int frame, std::uint32_t item_bytes) const {
    const std::uint32_t use = ++f_.state->sent[frame];
    ptx::st_release_sys(
        f_.words.filled + frame,
        net::frame_word(use, static_cast<std::uint32_t>(sizeof(RemoteHeader)) + item_bytes));
  }
  // True if the neighbour has read all chunks.
  __device__ bool all_read(int neighbour) const {
    bool all = true;
    const int first = f_.frame(neighbour, Direction::to_relay, 0);
    for (int i = first; i < first + kDirections * f_.frames; ++i) all &= may_fill(i);
    return all;
  }

  // ---- From a neighbour ----

  // True if a chunk is in the frame that has not been given back.
  __device__ bool landed(int frame) const {
    return net::use_of(ptx::ld_acquire_sys(f_.words.landed + frame)) == f_.state->read[frame] + 1;
  }
  // Bytes of items of the chunk that is here; none if it is no chunk.
  __device__ std::uint32_t bytes_in(int frame) const {
    const std::uint32_t bytes = net::bytes_of(ptx::ld_relaxed_sys(f_.words.landed + frame));
    return bytes < sizeof(RemoteHeader) ? 0
                                        : bytes - static_cast<std::uint32_t>(sizeof(RemoteHeader));
  }
  __device__ const RemoteHeader* chunk_in(int frame) const { return chunk(true, frame); }
  // Gives it back. One thread, behind a barrier if others have read it.
  __device__ void give_back(int frame) const {
    ptx::st_release_sys(f_.words.read + frame, net::frame_word(++f_.state->read[frame], 0));
  }

 private:
  __device__ RemoteHeader* chunk(bool incoming, int frame) const {
    return reinterpret_cast<RemoteHeader*>(
        f_.frames_at + f_.links.place(incoming, 0, static_cast<unsigned>(frame)) +
        sizeof(net::LinkHeader));
  }

  const RemoteDevice& f_;
};

__device__ inline std::byte* items_of(RemoteHeader* chunk) {
  return reinterpret_cast<std::byte*>(chunk + 1);
}
__device__ inline const std::byte* items_of(const RemoteHeader* chunk) {
  return reinterpret_cast<const std::byte*>(chunk + 1);
}

}  // namespace xd::ep::cuda
