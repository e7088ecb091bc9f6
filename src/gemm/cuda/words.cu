// Partial sums that travel as words, for small tensors: a whole operation in one launch behind the
// product, without a flag behind the records.
//
//   warps of a block of this rank                        the same block of a peer
//   push: vectors of the peers' parts ─────────────────► sum: takes them, one by one, as they come
//   sum: takes the peers' vectors of its own part,
//     adds them by ascending rank, finishes
//   all_reduce: pushes the finished vectors ───────────► gather: takes them
//
// The three run side by side, so that the links are never idle between the first vector and the
// last: while some vectors are pushed others come, and their sums go. Each thread asks for the
// vectors of several ranks at once, since every look at memory takes as long as the next.
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
// A block waits for words that any block of a peer may push. The warps that push wait for records
// alone, and all blocks are resident.
//
// A launch that depends on the product begins its turn, and enters, while that still ends. Its
// record says that this rank's operations before have ended, which they had when the product began;
// no peer reads what the product stores.
#include "gemm/cuda/epilogue.cuh"
#include "gemm/cuda/kernels.h"
#include "gemm/cuda/launch.cuh"
#include "gemm/cuda/turn.cuh"

namespace xd::gemm::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kMovers = 128;             // threads that push, and as many that gather
constexpr int kAtOnce = 4;               // vectors that a thread asks for at once
constexpr int kLooks = 4;                // at words before a wait looks around
constexpr int kPushed = 0, kSummed = 1;  // steps

// The warps of a block share its work by kind.
enum class Role { push, gather, sum };

template <DType kType>
class Words {
 public:
  __device__ Words(const InlineFlagParams& p, Turn& turn) : p_(p), turn_(turn), role_(role_of(p)) {
    const int others = role_ == Role::push ? 0 : role_ == Role::gather || !spreads(p) ? 1 : 2;
    const int width = role_ == Role::sum ? kThreads - others * kMovers : kMovers;
    next_.i = static_cast<int>(blockIdx.x) * width + thread() - others * kMovers;
    stride_ = static_cast<int>(gridDim.x) * width;
  }

  // The first vectors that this thread pushes, which need not wait for records.
  __device__ void begin() {
    if (role_ == Role::push && has_more()) push_some();
  }
  // All the rest. False after a fatal error; single threads.
  __device__ bool move();
  __device__ void keep() const { keep_largest(p_.epilogue, largest_); }

 private:
  static constexpr int kElements = kWidth<kType>;
  // Vector i of the part that a member of the role pushes or is pushed.
  struct Place {
    int member, i;
  };
  using Places = Place[kAtOnce];
  using Vectors = uint4[kAtOnce];

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  // Sums go to all ranks.
  __device__ static bool spreads(const InlineFlagParams& p) { return p.gathers && !p.one_step; }
  __device__ static Role role_of(const InlineFlagParams& p) {
    if (thread() < kMovers) return Role::push;
    return spreads(p) && thread() < 2 * kMovers ? Role::gather : Role::sum;
  }
  __device__ int rank() const { return turn_.rank(); }
  __device__ int ranks() const { return turn_.ranks(); }
  __device__ int start(int r) const { return p_.one_step ? 0 : static_cast<int>(p_.starts[r]); }
  __device__ int count(int r) const {
    return static_cast<int>(p_.one_step ? p_.starts[ranks()] : p_.starts[r + 1] - p_.starts[r]);
  }
  __device__ uint4 own(int vector) const {
    return ptx::ld_streaming(p_.product + std::int64_t{vector} * 16);
  }
  __device__ std::byte* word_at(int owner, int step, int source, int i) const {
    return turn_.words_at(owner, step, source) + std::int64_t{i} * 16;
  }
  // Members are the peers, next rank first. Where vectors are summed they are all ranks by
  // ascending number, and behind them as many as fill whole groups.
  __device__ int members() const {
    return role_ == Role::sum ? (ranks() + group() - 1) / group() * group() : ranks() - 1;
  }
  __device__ int group() const { return ranks() > 2 ? kAtOnce : 2; }
  __device__ int rank_of(int member) const {
    if (role_ == Role::sum) return member;
    const int r = rank() + 1 + member;
    return r < ranks() ? r : r - ranks();
  }
  // Whether there is such a vector.
  __device__ bool holds(const Place& place) const {
    if (role_ == Role::sum) return place.member < ranks() && place.i < end();
    return place.i < count(rank_of(place.member));
  }
  __device__ int end() const {
    return role_ == Role::sum ? count(rank()) : static_cast<int>(p_.longest);
  }

  __device__ bool has_more() const { return members() > 0 && next_.i < end(); }
  __device__ Place next_place();
  __device__ void push_some();
  __device__ bool receive_some();
  __device__ bool take(const Places& places, unsigned wanted, Vectors& to) const;
  __device__ void add(Places& places, Vectors& v);
  __device__ void finish_vector(int i);

  const InlineFlagParams& p_;
  Turn& turn_;
  const Role role_;
  Place next_{};  // of those that fall to this thread: all members' of one index, then of the next
  int stride_;
  float total_[kElements] = {};
  std::uint32_t largest_ = 0;
};

template <DType kType>
__device__ bool Words<kType>::move() {
  while (has_more()) {
    if (role_ == Role::push) {
      push_some();
    } else if (!receive_some()) {
      return false;
    }
  }
  return true;
}

template <DType kType>
__device__ auto Words<kType>::next_place() -> Place {
  const Place place = next_;
  const bool last = place.member + 1 == members();
  next_ = {last ? 0 : place.member + 1, last ? place.i + stride_ : place.i};
  return place;
}

template <DType kType>
__device__ void Words<kType>::push_some() {
  Places places;
  Vectors v;
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    const Place place = places[j] = next_place();
    if (holds(place)) v[j] = own(start(rank_of(place.member)) + place.i);
  }
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    if (!holds(places[j])) continue;
    push_words(word_at(rank_of(places[j].member), kPushed, rank(), places[j].i), v[j]);
  }
}

// Vectors of the own part, which are summed, or vectors of peers' parts, which these have summed.
// False after a fatal error.
template <DType kType>
__device__ bool Words<kType>::receive_some() {
  Places places;
  Vectors v;
  unsigned wanted = 0;
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    const Place place = places[j] = next_place();
    if (!holds(place)) continue;
    if (role_ == Role::sum && place.member == rank()) {
      v[j] = own(start(rank()) + place.i);
    } else {
      wanted |= 1u << j;
    }
  }
  if (!take(places, wanted, v)) return false;
  if (role_ == Role::sum) {
    add(places, v);
    return true;
  }
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    if (!holds(places[j])) continue;
    const int vector = start(rank_of(places[j].member)) + places[j].i;
    *reinterpret_cast<uint4*>(p_.epilogue.d + std::int64_t{vector} * 16) = v[j];
  }
  return true;
}

// Groups of ranks that follow one another, each of one index.
template <DType kType>
__device__ void Words<kType>::add(Places& places, Vectors& v) {
#pragma unroll 1
  for (int done = 0; done < kAtOnce && places[0].i < end(); done += group()) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (j >= group() || !holds(places[j])) continue;
      float part[kElements];
      widen<kType>(v[j], part);
#pragma unroll
      for (int e = 0; e < kElements; ++e) total_[e] += part[e];
    }
    if (places[0].member + group() == members()) finish_vector(places[0].i);
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // where groups are of two, the second one
      places[j] = places[j + 2];
      v[j] = v[j + 2];
    }
  }
}

// Waits for the wanted ones of some places, and takes their words away. False after a fatal error.
template <DType kType>
__device__ bool Words<kType>::take(const Places& places, unsigned wanted, Vectors& to) const {
  const int step = role_ == Role::sum ? kPushed : kSummed;
  device::KernelWait site = turn_.site(XD_PHASE_ROWS);
  if (role_ == Role::gather) site.timeouts = 2;  // sums wait for what was pushed
  std::byte* at[kAtOnce];
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    at[j] = word_at(rank(), step, rank_of(places[j].member), places[j].i);
  }
  unsigned missing = wanted;
  const auto look = [&] {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if ((missing >> j & 1) != 0) to[j] = vector_of(ptx::ld_relaxed_sys_pair(at[j]));
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if ((missing >> j & 1) != 0 && is_here(to[j])) missing &= ~(1u << j);
    }
  };
  int late = 0;
  const auto came = [&] {
    for (int n = 0; n < kLooks && (missing >> late & 1) != 0; ++n) look();
    return (missing >> late & 1) == 0;
  };
  while (missing != 0) {
    int source = 0;
#pragma unroll
    for (int j = kAtOnce - 1; j >= 0; --j) {
      if ((missing >> j & 1) == 0) continue;
      late = j;
      source = rank_of(places[j].member);
    }
    if (!device::wait_until(p_.turn.group.comm, site, source, came,
                            [] { return std::uint64_t{0}; })) {
      return false;
    }
  }
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    if ((wanted >> j & 1) != 0) take_away(at[j]);
  }
  return true;
}

// Where finished vectors go to all ranks D has the type of the product, so that a vector of one is
// one of the other. Else vectors of D may be half as wide, or twice.
template <DType kType>
__device__ void Words<kType>::finish_vector(int i) {
  const int vector = start(rank()) + i;
  // In reduce_scatter D begins with this rank's rows.
  const std::int64_t at = std::int64_t{p_.gathers ? vector : i} * kElements;
  const std::int64_t column = vector % static_cast<int>(p_.row_vectors) * kElements;
  complete(p_.epilogue, at, column, total_, largest_);
  if (!spreads(p_)) {
    store(p_.epilogue.d, p_.epilogue.d_type, at, total_);
  } else {
    const uint4 v = narrow<kType>(total_);
    for (int d = 0; d + 1 < ranks(); ++d) {
      const int peer = rank() + 1 + d < ranks() ? rank() + 1 + d : rank() + 1 + d - ranks();
      push_words(word_at(peer, kSummed, rank(), i), v);
    }
    *reinterpret_cast<uint4*>(p_.epilogue.d + std::int64_t{vector} * 16) = v;
  }
#pragma unroll
  for (int e = 0; e < kElements; ++e) total_[e] = 0;
}

template <DType kType>
__global__ void __launch_bounds__(kThreads, 1)
    words_kernel(const __grid_constant__ InlineFlagParams p) {
  __shared__ TurnShared shared;
  Turn turn(p.turn, shared);
  Words<kType> words(p, turn);
  const bool begun = turn.begin();
  if (begun) turn.enter();
  ptx::wait_for_kernel_before();
  if (begun) {
    words.begin();
    turn.await();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) turn.tell_opened();
  if (turn.verdict() == Verdict::go && !turn.any_failed(!words.move())) words.keep();
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
  const int blocks = blocks_for(params.longest, kMovers, multiprocessors);
  with_kernel(type, [&](auto* kernel) {
    launch_cooperative(kernel, params, blocks, kThreads, stream,
                       params.dependent ? Begin::dependent : Begin::behind);
  });
}

void load_words() {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    with_kernel(type, [](auto* kernel) { load_kernel(kernel); });
  }
}

}  // namespace xd::gemm::cuda
