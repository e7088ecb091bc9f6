// The turn of an operation of products (turn/device/turn.cuh). Records carry all that ranks
// compare; nobody looks for a peer's tensors, since rows travel through what contexts share.
//
// An operation is one launch that does it all (words.cu, gather_words.cu, push.cu), or several that
// share a launch number: open_kernel begins, enters and awaits; copies and products follow, on two
// streams; the last launch (close_kernel, or the sums) begins again, finds the turn its own and the
// records in their place, leaves and ends.
//
//   memory of rank r        written by                       trusted when
//   gathered rows           copies or push_kernel of source  `landed` of it; done flag of it
//   gathered rows           gather_words_kernel of r         its end (stream)
//   landed[s]               a copy behind those rows          it is the epoch that was opened
//   cells[s]                copies or products of s           done flag of s; all_reduce: `summed`
//   summed[s]               a copy behind those sums          it is the epoch that was opened
//   sums                    copies of all, all_reduce         `landed` of each
//   cells[s], again         copies of s, all_reduce           `spread` of s
//   spread[s]               a copy behind those sums          it is the epoch that was opened
//   words[parity][step][s]  (gather_)words_kernel of s        each word, when it is not all ones
//   columns[parity][s]      column_meeting_kernel of s        likewise
#pragma once

#include "gemm/cuda/params.h"
#include "turn/device/turn.cuh"

namespace xd::gemm::cuda {

using turn::Verdict;

struct TurnShared : turn::DeviceTurnShared<Record> {};

// A word that has not arrived. A word of a tensor that happens to be this one (a NaN) is changed to
// another NaN on its way.
inline constexpr std::uint64_t kNoWord = ~std::uint64_t{0};

// Waits for the 16 bytes at `at`, which `source` pushes; single threads. Takes them away, so that
// the place is empty when it comes round, two operations later. Nothing orders a word before or
// behind another: each is its own flag. False after a fatal error.
__device__ inline bool take_words(const DeviceComm& comm, const device::KernelWait& site,
                                  std::byte* at, int source, uint4& to) {
  ulonglong2 v;
  const bool here = device::wait_until(
      comm, site, source,
      [&] {
        v = ptx::ld_relaxed_sys_pair(at);
        return v.x != kNoWord && v.y != kNoWord;
      },
      [] { return std::uint64_t{0}; });
  if (!here) return false;
  ptx::st_relaxed_sys_pair(at, make_ulonglong2(kNoWord, kNoWord));
  to = make_uint4(static_cast<std::uint32_t>(v.x), static_cast<std::uint32_t>(v.x >> 32),
                  static_cast<std::uint32_t>(v.y), static_cast<std::uint32_t>(v.y >> 32));
  return true;
}

// As words travel.
__device__ inline ulonglong2 words_of(const uint4& from) {
  const auto word = [](std::uint32_t low, std::uint32_t high) {
    const std::uint64_t v = low | static_cast<std::uint64_t>(high) << 32;
    return v == kNoWord ? kNoWord >> 1 : v;
  };
  return make_ulonglong2(word(from.x, from.y), word(from.z, from.w));
}

__device__ inline void push_words(std::byte* at, const uint4& from) {
  ptx::st_relaxed_sys_pair(at, words_of(from));
}

class Turn : public turn::DeviceTurn<Turn, Family, TurnParams, TurnShared> {
 public:
  using DeviceTurn::DeviceTurn;

  __device__ bool await() {
    return DeviceTurn::await([](int, const Record&) { return true; });
  }

  // One thread of the launch, behind await(). Kernels and copies that read these come behind this
  // kernel, by stream or by event.
  __device__ void tell_opened() const {
    Control& control = *p_.group.control;
    control.agreed = verdict() == Verdict::go ? 1 : 0;
    if (verdict() != Verdict::fatal) control.opened = epoch();
  }

  // All threads of a block. Returns when all peers have left. False after a fatal error. `aliased`:
  // the block then reads by other addresses what the peers have stored.
  __device__ bool await_done(bool aliased = false) {
    bool failed = false;
    for (int source = thread(); source < ranks() && !failed; source += stride_of_block()) {
      std::uint64_t flag = 0;
      failed = source != rank() && !wait_done(source, flag);
    }
    // Between the flags and the barrier, so that it orders all threads' loads behind the stores.
    if (aliased && thread() < ranks()) ptx::fence_proxy_alias();
    return !any_failed(failed);
  }

  // Ends the operation; all threads of every block of its last launch call it, after leave(). Where
  // ranks disagree, words may have been pushed that nobody has read. They are taken away here:
  // after the done flags of all peers no more will come, and before this rank ends the operation,
  // so no peer has pushed words of a later one into the same place.
  __device__ void settle() {
    if (verdict() == Verdict::nothing && await_done()) clear_words();
    end();
  }

  // leave() and settle(), where nothing comes between: blocks are counted once.
  __device__ void leave_and_settle() {
    if (verdict() != Verdict::nothing) return leave_and_end();
    leave();
    settle();
  }

  // Likewise in an operation whose rows are words alone, all of which this rank has taken.
  __device__ void settle_words() {
    if (verdict() != Verdict::nothing) return end_without_flags();
    leave();
    settle();
  }

  __device__ std::byte* words_at(int owner, int step, int source) const {
    return area(owner).base + p_.group.map.words_of(epoch(), step, source, ranks());
  }
  __device__ bool take_words(std::byte* at, int source, uint4& to) const {
    return cuda::take_words(p_.group.comm, site(XD_PHASE_ROWS), at, source, to);
  }

  // This thread's part of work that all threads of the launch share.
  __device__ static std::int64_t first() {
    return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  }
  __device__ static std::int64_t stride() { return std::int64_t{gridDim.x} * blockDim.x; }

 private:
  __device__ static int stride_of_block() { return static_cast<int>(blockDim.x); }

  __device__ void clear_words() const {
    const ContextMap& map = p_.group.map;
    const std::uint64_t bytes =
        map.word_steps * static_cast<std::uint64_t>(ranks()) * map.word_bytes;
    if (bytes == 0) return;
    std::byte* const at = words_at(rank(), 0, 0);
    for (std::int64_t i = first(); i < static_cast<std::int64_t>(bytes / 16); i += stride()) {
      ptx::st_relaxed_sys_pair(at + i * 16, make_ulonglong2(kNoWord, kNoWord));
    }
  }
};

}  // namespace xd::gemm::cuda
