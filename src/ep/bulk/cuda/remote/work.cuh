// The work of an operation for other machines, which begins with the last block that leaves. All
// operations have done flags of this rank's sources behind it, and a wait for this rank's frames,
// which are here. hands.cuh has the work of many blocks, prepare.cuh that of one.
// docs/internals/machines_cuda.md shows why no wait goes in a circle.
#pragma once

#include "ep/bulk/cuda/remote/turn.cuh"
#include "ep/bulk/cuda/rows.cuh"

namespace xd::ep::cuda {

// In shared memory.
struct RemoteShared {
  std::uint8_t missing[kMaxDeviceRanks];  // by neighbour: the source has not found memory
};

// `Derived` has, for all threads of the last block that leaves:
//   clear()   before anything else
//   do_all()  sends and takes everything, where the operation moves; false after a fatal error
template <class Derived>
class RemoteWork {
 public:
  __device__ RemoteWork(const TurnParams& params, Turn& turn, TurnShared& turn_shared,
                        RemoteShared& shared)
      : turn_(turn), shared_(turn_shared), remote_turn_(params, turn), missing_(shared.missing) {}

  // ---- Of turn::DeviceTurn::leave() ----

  __device__ void before_done() {
    for (int i = thread_in_block(); i < kMaxDeviceRanks; i += threads_per_block()) missing_[i] = 0;
    self().clear();
    __syncthreads();
    // Another block may have skipped rows that this one would send.
    if (turn_.any_failed(turn_.met_fatal())) return;
    if (takes_part()) {
      // A thread that refuses something ends the work of others by the board alone.
      if (turn_.any_failed(!self().do_all() || device::failed(turn_.group().comm))) return;
    }
    remote_turn_.raise_done(missing_);
  }
  __device__ void after_done() {
    if (turn_.verdict() != Verdict::fatal) remote_turn_.rest();
  }
  __device__ bool raises_done(int rank) const { return remote().machine_of[rank] == kNear; }
  // A near rank raises its flag behind its work for other machines, where it may wait, too.
  static constexpr int kDoneTimeouts = 2;

 protected:
  __device__ const RemoteDevice& remote() const { return remote_turn_.remote(); }
  __device__ const Directions& directions() const { return remote_turn_.directions(); }
  __device__ bool moves() const { return turn_.moves(); }
  // Otherwise nobody sends or expects chunks. All blocks come to the same, but after a fatal error.
  __device__ bool takes_part() const {
    return turn_.verdict() == Verdict::go || turn_.verdict() == Verdict::blank;
  }
  // The remote machine of a choice's row, or kNear, also if it has none. Any thread.
  __device__ int machine_of_code(std::uint32_t code) const {
    const GroupDevice& g = turn_.group();
    const std::uint32_t row = g.layout.row_per_expert ? code : code / g.codec_experts;
    if (code == RowCodec::kNone || row >= shared_.base[turn_.ranks()]) return kNear;
    return remote().machine_of[rank_of_row(shared_, turn_.ranks(), row)];
  }

  Turn& turn_;
  TurnShared& shared_;
  const RemoteTurn remote_turn_;
  std::uint8_t* const missing_;

 private:
  __device__ Derived& self() { return static_cast<Derived&>(*this); }
};

// The work of a kernel for other machines; where there are none, it is nothing.
template <bool kRemote, class Work, class Params, class... Rest>
__device__ auto make_remote_work(const Params& params, Turn& turn, TurnShared& turn_shared,
                                 Rest&&... rest) {
  if constexpr (kRemote) {
    __shared__ typename Work::Shared shared;
    return Work(params, turn, turn_shared, shared, rest...);
  } else {
    return turn::NoWork{};
  }
}

}  // namespace xd::ep::cuda
