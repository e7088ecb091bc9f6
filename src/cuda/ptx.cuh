// All PTX of the library. A function's name has its instruction, order and scope, so a diff that
// weakens an order shows in a name.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "kernels need compute capability 9.0: 90 or more in CMAKE_CUDA_ARCHITECTURES"
#endif

namespace xd::ptx {

// ---- Flags and words ---------------------------------------------------------------------------

__device__ inline std::uint64_t ld_acquire_sys(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ inline std::uint32_t ld_acquire_sys(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ inline std::uint32_t ld_acquire_gpu(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ inline std::uint64_t ld_relaxed_sys(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ inline std::uint32_t ld_relaxed_sys(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ inline void st_release_sys(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ inline void st_release_sys(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ inline void st_relaxed_sys(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ inline void st_relaxed_gpu(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Two words, each whole by itself: nothing orders one of them behind the other.
__device__ inline ulonglong2 ld_relaxed_sys_pair(const void* p) {
  ulonglong2 v;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(v.x), "=l"(v.y)
               : "l"(p)
               : "memory");
  return v;
}

__device__ inline void st_relaxed_sys_pair(void* p, const ulonglong2& v) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(v.x), "l"(v.y)
               : "memory");
}

// All that the thread has loaded and stored so far comes before all that it stores from now on.
__device__ inline void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ inline std::uint32_t add_acq_rel_gpu(std::uint32_t* p, std::uint32_t v) {
  std::uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}

__device__ inline std::uint32_t add_relaxed_gpu(std::uint32_t* p, std::uint32_t v) {
  std::uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}

// Both add to words of which nobody here needs the old value.
__device__ inline void red_add_relaxed_gpu(std::uint64_t* p, std::uint64_t v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ inline void red_add_release_gpu(std::uint64_t* p, std::uint64_t v) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ inline std::uint32_t cas_acq_rel_sys(std::uint32_t* p, std::uint32_t expected,
                                                std::uint32_t desired) {
  std::uint32_t old;
  asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(p), "r"(expected), "r"(desired)
               : "memory");
  return old;
}

__device__ inline std::uint64_t cas_acquire_gpu(std::uint64_t* p, std::uint64_t expected,
                                                std::uint64_t desired) {
  std::uint64_t old;
  asm volatile("atom.acquire.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(p), "l"(expected), "l"(desired)
               : "memory");
  return old;
}

__device__ inline std::uint64_t or_acquire_gpu(std::uint64_t* p, std::uint64_t bits) {
  std::uint64_t old;
  asm volatile("atom.acquire.gpu.global.or.b64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(p), "l"(bits)
               : "memory");
  return old;
}

__device__ inline std::uint64_t or_relaxed_gpu(std::uint64_t* p, std::uint64_t bits) {
  std::uint64_t old;
  asm volatile("atom.relaxed.gpu.global.or.b64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(p), "l"(bits)
               : "memory");
  return old;
}

// Adds to a word of shared memory where `adds` holds, without a branch.
__device__ inline void add_shared_if(bool adds, std::uint32_t* p, std::uint32_t v) {
  asm volatile(
      "{ .reg .pred q; setp.ne.u32 q, %0, 0; @q red.relaxed.cta.shared::cta.add.u32 [%1], %2; }" ::
          "r"(static_cast<std::uint32_t>(adds)),
      "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(p))), "r"(v)
      : "memory");
}

// ---- Blocks and launches -----------------------------------------------------------------------

// A barrier of some warps of the block, `threads` in all; barrier 0 is __syncthreads().
__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier_sync() for a thread that goes on at once: what it has done comes before what the threads
// do that wait at the barrier.
__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Stands in loops that wait for another warp of the block by its shared memory.
__device__ inline void pause() { __nanosleep(32); }

// Returns when the kernel before this one in the stream has ended and all that it has written is
// visible here. Without programmatic dependent launch that holds from the start.
__device__ inline void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel of the stream come onto multiprocessors that this one leaves, if that kernel
// was launched as a dependent one. That kernel then waits by wait_for_kernel_before().
__device__ inline void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// The block's dynamic shared memory.
__device__ inline std::byte* dynamic_shared() {
  extern __shared__ __align__(128) std::byte dynamic_shared_bytes[];
  return dynamic_shared_bytes;
}

// Makes the compiler load `v`, even if nothing else uses it.
__device__ inline void keep(std::uint32_t v) { asm volatile("" ::"r"(v)); }

// ---- Rows through registers --------------------------------------------------------------------

// A load for data that is read once: it is not kept in L1. The load is coherent and never ld.nc,
// since peers may have written this memory.
__device__ inline uint4 ld_streaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ inline uint2 ld_streaming_half(const void* p) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p)
               : "memory");
  return v;
}

__device__ inline void st_streaming(void* p, const uint4& v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ inline void st_streaming(void* p, const uint2& v) {
  asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y)
               : "memory");
}
__device__ inline void st_streaming(void* p, std::uint32_t v) {
  asm volatile("st.global.L1::no_allocate.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ inline void st_streaming_pair(void* p, const ulonglong2& v) {
  asm volatile("st.global.L1::no_allocate.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(v.x), "l"(v.y)
               : "memory");
}

// ---- Rows through shared memory ----------------------------------------------------------------

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Begins to copy 16 bytes from global to shared memory, past L1. The copy belongs to the generic
// proxy, is coherent, and comes behind what the thread has acquired.
__device__ inline void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}

// Ends the thread's present group of such copies, which may be empty.
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// When it returns, all groups of the calling thread but the last kPending have ended, and it sees
// what they have copied.
template <int kPending>
__device__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Bulk copies -------------------------------------------------------------------------------

__device__ inline void mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Call it before the barrier's memory is used for anything else.
__device__ inline void mbarrier_invalidate(std::uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Call it after mbarrier_init, before a bulk copy uses the barrier.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive_expect_bytes(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ inline bool mbarrier_try_wait(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Addresses and size are multiples of 16 bytes. The barrier counts the bytes when they have landed.
__device__ inline void bulk_load(void* shared, const void* global, std::uint32_t bytes,
                                 std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// The store belongs to the calling thread's current bulk group.
__device__ inline void bulk_store(void* global, const void* shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// When it returns, the calling thread's stores have read their sources, which may be overwritten.
// It does not say that any of them has landed.
__device__ inline void bulk_wait_sources_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// When it returns, the calling thread's stores are complete and visible to it, so that it may
// release them.
__device__ inline void bulk_wait_landed() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Each stands between generic accesses and bulk copies of the same memory, in either order. The
// form that names no state space also is a barrier of memory for the whole device, which waits for
// the thread's earlier stores to peers.
__device__ inline void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ inline void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stands between accesses of one memory by different addresses, where the launch that comes second
// may have begun before the first access. It waits for the thread's earlier stores to peers.
__device__ inline void fence_proxy_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// ---- Numbers -----------------------------------------------------------------------------------

__device__ inline std::uint64_t global_timer_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Rounds two float32 to bfloat16, to nearest, ties to even; `low` goes into the low half.
__device__ inline std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// Rounds two float32 to float16 in the same way.
__device__ inline std::uint32_t pack_f16(float low, float high) {
  std::uint32_t v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// The larger magnitudes of two pairs of bfloat16, in both halves; `b` has no signs. A NaN wins.
__device__ inline std::uint32_t max_magnitudes_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t v;
  asm("{ .reg .b32 m;\n abs.bf16x2 m, %1;\n max.NaN.bf16x2 %0, m, %2; }"
      : "=r"(v)
      : "r"(a), "r"(b));
  return v;
}

// 1 / x to within one unit in the last place, for numbers and results that are not subnormal.
__device__ inline float approximate_reciprocal(float x) {
  float v;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}

// Rounds two float32 to float8 e4m3fn, to nearest, ties to even, limited to +-448.
__device__ inline std::uint16_t pack_e4m3(float low, float high) {
  std::uint16_t v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}

// The same of four, the first in the lowest byte.
__device__ inline std::uint32_t pack_e4m3_four(float a, float b, float c, float d) {
  std::uint32_t v;
  asm("{ .reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n mov.b32 %0, {low, high}; }"
      : "=r"(v)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return v;
}

// The numbers of two e4m3 codes, as a pair of float16, the lower byte's in the lower half.
__device__ inline std::uint32_t unpack_e4m3(std::uint16_t codes) {
  std::uint32_t v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"(codes));
  return v;
}

// Rounds two float32 to float8 e5m2, to nearest, ties to even, limited to +-57344.
__device__ inline std::uint16_t pack_e5m2(float low, float high) {
  std::uint16_t v;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}

}  // namespace xd::ptx
