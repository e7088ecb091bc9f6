// Chunks between a kernel and ranks on other machines, through the proxy (net/commands.h). A block
// at a time uses the directions; what is said to be for one thread is for any thread of it.
//
//   memory                 written by                  read by
//   frames that are sent   this block, when it may     the proxy, after `filled`
//   frames that land       the network                 this block, after `landed`
//   RemoteState            this block; later kernels   this block
//
// All words are in pinned memory. `filled` and `read` are stored with release (sys) behind a
// barrier of the block, which covers the stores and loads of all its threads.
#pragma once

#include "cuda/ptx.cuh"
#include "ep/bulk/cuda/remote/params.h"

namespace xd::ep::cuda {

class Directions {
 public:
  __device__ explicit Directions(const RemoteDevice& remote) : f_(remote) {}

  // ---- To a neighbour ----

  // True if the next chunk may be written: its frame's last one has been read. One thread.
  __device__ bool may_fill(int neighbour, Direction direction) const {
    const std::uint64_t n = f_.state->filled[neighbour][at(direction)];
    return net::use_of(ptx::ld_acquire_sys(f_.words.freed + frame(neighbour, direction, n))) ==
           uses_before(n);
  }
  // The chunk that fill() sends.
  __device__ RemoteHeader* next_out(int neighbour, Direction direction) const {
    return chunk(false, neighbour, direction, f_.state->filled[neighbour][at(direction)]);
  }
  // Sends it. One thread, behind a barrier if others have written items.
  __device__ void fill(int neighbour, Direction direction, std::uint32_t item_bytes) const {
    std::uint64_t& n = f_.state->filled[neighbour][at(direction)];
    const std::uint64_t word = net::frame_word(
        uses_before(n) + 1, static_cast<std::uint32_t>(sizeof(RemoteHeader)) + item_bytes);
    ptx::st_release_sys(f_.words.filled + frame(neighbour, direction, n), word);
    ++n;
  }
  // True if the neighbour has read all chunks of the direction.
  __device__ bool all_read(int neighbour, Direction direction) const {
    const std::uint64_t n = f_.state->filled[neighbour][at(direction)];
    bool all = true;
    for (std::uint64_t next = n; next < n + kDirectionFrames; ++next) {
      const std::uint64_t* freed = f_.words.freed + frame(neighbour, direction, next);
      all &= net::use_of(ptx::ld_acquire_sys(freed)) == uses_before(next);
    }
    return all;
  }

  // ---- From a neighbour ----

  // True if the direction's next chunk is here. One thread.
  __device__ bool landed(int neighbour, Direction direction) const {
    const std::uint64_t n = f_.state->read[neighbour][at(direction)];
    return net::use_of(ptx::ld_acquire_sys(f_.words.landed + frame(neighbour, direction, n))) ==
           uses_before(n) + 1;
  }
  // Bytes of items of the chunk that is here; none if it is no chunk.
  __device__ std::uint32_t bytes_in(int neighbour, Direction direction) const {
    const std::uint64_t n = f_.state->read[neighbour][at(direction)];
    const std::uint32_t bytes =
        net::bytes_of(ptx::ld_relaxed_sys(f_.words.landed + frame(neighbour, direction, n)));
    return bytes < sizeof(RemoteHeader) ? 0
                                        : bytes - static_cast<std::uint32_t>(sizeof(RemoteHeader));
  }
  __device__ const RemoteHeader* next_in(int neighbour, Direction direction) const {
    return chunk(true, neighbour, direction, f_.state->read[neighbour][at(direction)]);
  }
  // Gives it back. One thread, behind a barrier if others have read it.
  __device__ void give_back(int neighbour, Direction direction) const {
    std::uint64_t& n = f_.state->read[neighbour][at(direction)];
    ptx::st_release_sys(f_.words.read + frame(neighbour, direction, n),
                        net::frame_word(uses_before(n) + 1, 0));
    ++n;
  }

 private:
  __device__ static constexpr int at(Direction direction) { return static_cast<int>(direction); }
  __device__ static int frame(int neighbour, Direction direction, std::uint64_t n) {
    return neighbour * kRemoteFrames + at(direction) * kDirectionFrames + direction_frame_of(n);
  }
  __device__ RemoteHeader* chunk(bool incoming, int neighbour, Direction direction,
                                 std::uint64_t n) const {
    const auto place =
        static_cast<unsigned>(frame(neighbour, direction, n) - neighbour * kRemoteFrames);
    return reinterpret_cast<RemoteHeader*>(f_.frames + f_.links.place(incoming, neighbour, place) +
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
