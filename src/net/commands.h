// The words by which kernels use links: through these they tell a proxy (net/proxy.h), which has
// the links, what they have done with frames, and learn from it what they may do.
//
// There is one word for each frame, by LinkMap: neighbour * frames + frame. So there is no queue
// that could be full, and no command that waits for another one. A word holds which use of its
// frame it is about, counted from 1 over the life of the links, and the bytes of the chunk:
//
//   word     written by  means                              its writer has, before
//   filled   kernels     send this chunk                    written the chunk
//   freed    the proxy   the neighbour has read this use:     -
//                        the frame may be filled again
//   landed   the proxy   a chunk of the neighbour is here     seen the chunk land
//   read     kernels     the chunk has been read            read it, or has no use for it
//
// `read` is about all uses up to the one that it names, and may be ahead of what has landed: a
// chunk that nobody has a use for goes back as soon as it comes.
//
// Every word has one writer, which stores it with release; its reader loads it with acquire. All of
// them lie in memory that host and device see, those of either writer apart from the other's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xd::net {

constexpr std::uint64_t frame_word(std::uint32_t use, std::uint32_t bytes) {
  return std::uint64_t{use} << 32 | bytes;
}
constexpr std::uint32_t use_of(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32);
}
constexpr std::uint32_t bytes_of(std::uint64_t word) { return static_cast<std::uint32_t>(word); }

struct FrameWords {
  std::uint64_t* filled = nullptr;
  std::uint64_t* read = nullptr;
  std::uint64_t* freed = nullptr;
  std::uint64_t* landed = nullptr;

  static constexpr std::size_t kLineWords = 16;  // two cache lines, which some processors fetch
  static constexpr std::size_t words(std::size_t frames) { return 4 * row(frames); }
  // In `memory` of words(frames), which is zero at first.
  static constexpr FrameWords in(std::uint64_t* memory, std::size_t frames) {
    return {memory, memory + row(frames), memory + 2 * row(frames), memory + 3 * row(frames)};
  }

 private:
  static constexpr std::size_t row(std::size_t frames) {
    return (frames + kLineWords - 1) / kLineWords * kLineWords;
  }
};

}  // namespace xd::net
