// Partial sums that travel as words, for small tensors: a whole operation in one launch behind the
// product, without a flag behind the records.
//
//   block of this rank                                   the same block of a peer
//   pushes vectors of the peers' parts ────────────────► takes them, one by one, as they come
//   takes the peers' vectors of its own part,
//     sums by ascending rank, finishes
//   all_reduce: pushes the finished vectors ───────────► takes them
//
// Words are pushed before the records have come: they go where nothing else is. The place of an
// operation's parity is empty: its reader took the words of two operations ago before it entered
// the operation in between, and this rank has seen it enter. Words are taken only where all ranks
// agree; else Turn::settle() takes them away.
//
// There are no done flags where all ranks agree. Every rank takes each word that is pushed to it,
// and each record: when it has, its peers store nothing more into its memory in this operation, and
// it may end and go. Words that it has pushed itself stay for the peers, who need nothing else of
// it.
//
// A block waits for words that any block of a peer may push, and pushes its own first, so all
// blocks are resident.
#include "gemm/cuda/epilogue.cuh"
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/launch.cuh"
#include "gemm/cuda/turn.cuh"

namespace xd::gemm::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kPushed = 0, kSummed = 1;  // steps

template <DType kType>
class Words {
 public:
  __device__ Words(const InlineFlagParams& p, Turn& turn) : p_(p), turn_(turn) {}

  __device__ void push() const;
  // Both return false after a fatal error; single threads.
  __device__ bool sum();
  __device__ bool take_sums() const;
  __device__ void keep() const { keep_largest(p_.epilogue, largest_); }

 private:
  static constexpr int kElements = kWidth<kType>;

  __device__ std::int64_t start(int rank) const { return p_.one_step ? 0 : p_.starts[rank]; }
  __device__ std::int64_t count(int rank) const {
    return p_.one_step ? p_.starts[turn_.ranks()] : p_.starts[rank + 1] - p_.starts[rank];
  }
  __device__ uint4 own(std::int64_t vector) const {
    return ptx::ld_streaming(p_.product + vector * 16);
  }
  __device__ bool sum_vector(std::int64_t i, float (&sum)[kElements]) const;
  // Vectors of D are half as wide as those of the product, or as wide, or twice as wide; a finished
  // vector is pushed as the words of a product's vector, so its type has the product's size.
  __device__ void push_sum(std::int64_t i) const;

  const InlineFlagParams& p_;
  Turn& turn_;
  std::uint32_t largest_ = 0;
};

template <DType kType>
__device__ void Words<kType>::push() const {
  for (int d = 1; d < turn_.ranks(); ++d) {
    const int peer = (turn_.rank() + d) % turn_.ranks();
    std::byte* const to = turn_.words_at(peer, kPushed, turn_.rank());
    for (std::int64_t i = Turn::first(); i < count(peer); i += Turn::stride()) {
      push_words(to + i * 16, own(start(peer) + i));
    }
  }
}

template <DType kType>
__device__ bool Words<kType>::sum_vector(std::int64_t i, float (&sum)[kElements]) const {
  float part[kElements];
#pragma unroll
  for (int e = 0; e < kElements; ++e) sum[e] = 0;
  for (int source = 0; source < turn_.ranks(); ++source) {
    uint4 v;
    if (source == turn_.rank()) {
      v = own(start(source) + i);
    } else if (!turn_.take_words(turn_.words_at(turn_.rank(), kPushed, source) + i * 16, source,
                                 v)) {
      return false;
    }
    widen<kType>(v, part);
#pragma unroll
    for (int e = 0; e < kElements; ++e) sum[e] += part[e];
  }
  return true;
}

template <DType kType>
__device__ bool Words<kType>::sum() {
  const std::int64_t begin = start(turn_.rank());
  // In reduce_scatter D begins with this rank's rows.
  const std::int64_t of_d = p_.gathers ? begin : 0;
  for (std::int64_t i = Turn::first(); i < count(turn_.rank()); i += Turn::stride()) {
    float sum[kElements];
    if (!sum_vector(i, sum)) return false;
    const std::int64_t column = (begin + i) % p_.row_vectors * kElements;
    finish(p_.epilogue, (of_d + i) * kElements, column, sum, largest_);
    if (p_.gathers && !p_.one_step) push_sum(i);
  }
  return true;
}

// The thread that has stored these elements of D reads them again.
template <DType kType>
__device__ void Words<kType>::push_sum(std::int64_t i) const {
  const std::int64_t vector = start(turn_.rank()) + i;
  const uint4 v = *reinterpret_cast<const uint4*>(p_.epilogue.d + vector * 16);
  for (int d = 1; d < turn_.ranks(); ++d) {
    const int peer = (turn_.rank() + d) % turn_.ranks();
    push_words(turn_.words_at(peer, kSummed, turn_.rank()) + i * 16, v);
  }
}

template <DType kType>
__device__ bool Words<kType>::take_sums() const {
  for (int d = 1; d < turn_.ranks(); ++d) {
    const int source = (turn_.rank() + turn_.ranks() - d) % turn_.ranks();
    std::byte* const from = turn_.words_at(turn_.rank(), kSummed, source);
    for (std::int64_t i = Turn::first(); i < count(source); i += Turn::stride()) {
      uint4 v;
      if (!turn_.take_words(from + i * 16, source, v)) return false;
      *reinterpret_cast<uint4*>(p_.epilogue.d + (start(source) + i) * 16) = v;
    }
  }
  return true;
}

template <DType kType>
__global__ void __launch_bounds__(kThreads, 1)
    words_kernel(const __grid_constant__ InlineFlagParams p) {
  __shared__ TurnShared shared;
  ptx::wait_for_kernel_before();
  Turn turn(p.turn, shared);
  Words<kType> words(p, turn);
  if (turn.begin()) {
    turn.enter();
    words.push();
    turn.await();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) turn.tell_opened();
  if (turn.verdict() == Verdict::go) {
    bool failed = !words.sum();
    if (!failed && p.gathers && !p.one_step) failed = !words.take_sums();
    if (!turn.any_failed(failed)) words.keep();
  }
  turn.settle_words();
}

template <class Do>
void with_kernel(DType type, Do&& act) {
  switch (type) {
    case DType::f32:
      return act(words_kernel<DType::f32>);
    case DType::f16:
      return act(words_kernel<DType::f16>);
    default:
      return act(words_kernel<DType::bf16>);
  }
}

}  // namespace

void launch_words(const InlineFlagParams& params, DType type, int multiprocessors,
                  cudaStream_t stream) {
  // The longest part that a thread goes through, of any rank: all of them in one step.
  const int ranks = params.turn.group.ranks();
  std::int64_t most = params.one_step ? params.starts[ranks] : 0;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t part = params.starts[r + 1] - params.starts[r];
    most = part > most ? part : most;
  }
  with_kernel(type, [&](auto* kernel) {
    launch_cooperative(kernel, params, blocks_for(most, kThreads, multiprocessors), kThreads,
                       stream, params.dependent ? Begin::dependent : Begin::behind);
  });
}

void load_words() {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    with_kernel(type, [](auto* kernel) { load_kernel(kernel); });
  }
}

}  // namespace xd::gemm::cuda
