list(APPEND xd_device_kinds cuda)
if(XD_CUDA)
  list(APPEND xd_device_kind_sources
    comm/cuda/device_kind.cc
    comm/cuda/registered.cc
    comm/cuda/segment.cc
    comm/cuda/side.cc
  )
  list(APPEND xd_device_kind_depends xd_cuda)
else()
  list(APPEND xd_device_kind_sources comm/cuda/not_built.cc)
endif()
