// PTX of compute capability 9.0 alone: the tensor cores of Hopper, and copies of boxes for them.
// Code of sm_90a runs on no other chip. All other PTX is in ptx.cuh.
#pragma once

#include "cuda/ptx.cuh"

namespace xd::ptx {

// ---- Copies of boxes ---------------------------------------------------------------------------

// Begins to copy a box of a tensor of three dimensions to shared memory, where its bytes are
// counted by the barrier when they have landed. `map` is a CUtensorMap among the kernel's
// parameters; x counts along the dimension whose elements are packed. Elements outside of
// the tensor come as zeros, which are counted as well.
__device__ inline void tensor_load(void* shared, const void* map, int x, int y, int z,
                                   std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

__device__ inline void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Release, in the block: what the thread has read comes before what is done behind the barrier.
__device__ inline void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// ---- Registers ---------------------------------------------------------------------------------

// Gives up registers, or waits until there are as many: kCount for each thread from here on. All
// warps of a warpgroup call them, and warpgroups together take no more than the kernel began with.
template <int kCount>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- Products ----------------------------------------------------------------------------------

// Stands before the first product of a warpgroup that reads or writes registers which other
// instructions have written. All four warps call these functions, at once.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends the warpgroup's present group of products.
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// When it returns, all groups of products but the last kPending have ended: they have read their
// shared memory. Their registers may be read behind settle() alone.
template <int kPending>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Makes the compiler read these registers behind here, and not before: it does not know when a
// product writes them.
template <int kCount>
__device__ void settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Lists of a product's registers, as operands and in the instruction's text.
#define XD_PTX_4(d, i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define XD_PTX_16(d, i) XD_PTX_4(d, i), XD_PTX_4(d, i + 4), XD_PTX_4(d, i + 8), XD_PTX_4(d, i + 12)
#define XD_PTX_64(d, i) \
  XD_PTX_16(d, i), XD_PTX_16(d, i + 16), XD_PTX_16(d, i + 32), XD_PTX_16(d, i + 48)
#define XD_PTX_NAMES_64                                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define XD_PTX_NAMES_128                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, " \
  "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, " \
  "%87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, "   \
  "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "  \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Products of a warpgroup: d = (adds ? d : 0) + A B, for A [64,k] and B [k,n] in shared memory that
// descriptors describe. Of the two template arguments, each is 1 if the operand is stored by
// columns of A, or by rows of B, and 0 if the k elements of a line are packed. In lane l of warp w,
// d[4 j + 2 h + i] is the sum in row 16 w + 8 h + l / 4 and column 8 j + 2 (l % 4) + i.
#define XD_PTX_WGMMA_16_BIT(type)                                                             \
  template <int kColumnsOfA, int kRowsOfB>                                                    \
  __device__ void wgmma_##type(float(&d)[128], std::uint64_t a, std::uint64_t b, bool adds) { \
    asm volatile(                                                                             \
        "{ .reg .pred p;\n setp.ne.b32 p, %130, 0;\n"                                         \
        " wgmma.mma_async.sync.aligned.m64n256k16.f32." #type "." #type " {" XD_PTX_NAMES_128 \
        "}, %128, %129, p, 1, 1, %131, %132;\n}"                                              \
        : XD_PTX_64(d, 0), XD_PTX_64(d, 64)                                                   \
        : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(kColumnsOfA), "n"(kRowsOfB)        \
        : "memory");                                                                          \
  }                                                                                           \
  template <int kColumnsOfA, int kRowsOfB>                                                    \
  __device__ void wgmma_##type(float(&d)[64], std::uint64_t a, std::uint64_t b, bool adds) {  \
    asm volatile(                                                                             \
        "{ .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"                                          \
        " wgmma.mma_async.sync.aligned.m64n128k16.f32." #type "." #type " {" XD_PTX_NAMES_64  \
        "}, %64, %65, p, 1, 1, %67, %68;\n}"                                                  \
        : XD_PTX_64(d, 0)                                                                     \
        : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(kColumnsOfA), "n"(kRowsOfB)        \
        : "memory");                                                                          \
  }
XD_PTX_WGMMA_16_BIT(bf16)
XD_PTX_WGMMA_16_BIT(f16)

// Of fp8, whose operands have packed lines alone.
__device__ inline void wgmma_e4m3(float (&d)[64], std::uint64_t a, std::uint64_t b, bool adds) {
  asm volatile(
      "{ .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
      " {" XD_PTX_NAMES_64 "}, %64, %65, p, 1, 1;\n}"
      : XD_PTX_64(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds))
      : "memory");
}

#undef XD_PTX_WGMMA_16_BIT
#undef XD_PTX_NAMES_128
#undef XD_PTX_NAMES_64
#undef XD_PTX_64
#undef XD_PTX_16
#undef XD_PTX_4

}  // namespace xd::ptx
