if(NOT XD_CUDA)
  return()
endif()
list(APPEND xd_executors cuda)

xd_layer(xd_ep_cuda
  SOURCES
    ep/cuda/call_memory.cc
    ep/cuda/combine.cu
    ep/cuda/cuda_group.cc
    ep/cuda/dispatch.cu
    ep/cuda/failed.cu
    ep/cuda/far_group.cc
    ep/cuda/kernel_params.cc
    ep/cuda/launch_shape.cc
    ep/cuda/ll_call_params.cc
    ep/cuda/ll_combine.cu
    ep/cuda/ll_control.cu
    ep/cuda/ll_dispatch.cu
    ep/cuda/ll_group.cc
    ep/cuda/ll_report.cc
    ep/cuda/ll_shape.cc
    ep/cuda/local.cu
    ep/cuda/prepare.cu
    ep/cuda/report.cc
    ep/cuda/sm_ledger.cc
  DEPENDS
    xd_ep
    xd_cuda
)
target_compile_options(xd_ep_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off> $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false>)
