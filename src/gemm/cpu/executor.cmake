list(APPEND xd_executors cpu)

xd_layer(xd_gemm_cpu
  SOURCES
    gemm/cpu/cpu_context.cc
  DEPENDS
    xd_gemm
    hwy::hwy
    ${CMAKE_DL_LIBS}
)
# Sums have one defined order and rounding: a product and the sum after it are not fused.
target_compile_options(xd_gemm_cpu PRIVATE -ffp-contract=off)
