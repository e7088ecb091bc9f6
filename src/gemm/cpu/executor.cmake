list(APPEND xd_executors cpu)

# oneDNN is looked up at run time (gemm/cpu/onednn.h), so nothing of it is needed to build.
xd_layer(xd_gemm_cpu
  SOURCES
    gemm/cpu/all_gather.cc
    gemm/cpu/cpu_context.cc
    gemm/cpu/elements.cc
    gemm/cpu/finish.cc
    gemm/cpu/lockstep.cc
    gemm/cpu/memory.cc
    gemm/cpu/multiply.cc
    gemm/cpu/onednn.cc
    gemm/cpu/plan.cc
    gemm/cpu/reduce.cc
    gemm/cpu/room.cc
    gemm/cpu/transfer.cc
  DEPENDS
    xd_gemm
    hwy::hwy
    ${CMAKE_DL_LIBS}
)
# Sums have one defined order and rounding: a product and the sum after it are not fused.
target_compile_options(xd_gemm_cpu PRIVATE -ffp-contract=off)
