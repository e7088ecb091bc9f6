if(NOT XD_CUDA)
  return()
endif()
list(APPEND xd_executors cuda)

xd_layer(xd_gemm_cuda
  SOURCES
    gemm/cuda/all_reduce.cc
    gemm/cuda/block_scales.cc
    gemm/cuda/block_scales.cu
    gemm/cuda/call_shape.cc
    gemm/cuda/columns.cu
    gemm/cuda/cuda_context.cc
    gemm/cuda/finish.cu
    gemm/cuda/gather_words.cu
    gemm/cuda/kernel_loader.cc
    gemm/cuda/meeting.cc
    gemm/cuda/opening.cu
    gemm/cuda/operations.cc
    gemm/cuda/products.cc
    gemm/cuda/push.cu
    gemm/cuda/scaled_products.cc
    gemm/cuda/schedule.cc
    gemm/cuda/sizes.cc
    gemm/cuda/stitched_slots.cc
    gemm/cuda/sum.cu
    gemm/cuda/transfer.cc
    gemm/cuda/tuning.cc
    gemm/cuda/words.cu
  DEPENDS
    xd_gemm_cublasmp
)
# Sums have one defined order and rounding: a product and the sum after it are not fused.
target_compile_options(xd_gemm_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off> $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false>)
