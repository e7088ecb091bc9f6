# Decides whether the CUDA executor is built: XD_CUDA. The runtime is linked statically and the
# driver is looked up at run time, so that the library also starts on machines without a driver.

set(XD_CUDA OFF)
if(NOT CROSSDOCK_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "CROSSDOCK_CUDA = ${CROSSDOCK_CUDA}, expected AUTO, ON or OFF")
endif()
if(CROSSDOCK_CUDA STREQUAL "ON")
  set(XD_CUDA ON)
elseif(CROSSDOCK_CUDA STREQUAL "AUTO" AND NOT CROSSDOCK_SANITIZE)  # sanitizers look at host code
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(XD_CUDA ON)
  else()
    message(STATUS "nvcc not found: the CUDA executor is not built")
  endif()
endif()

if(XD_CUDA)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90-real 90-virtual)  # machine code, and PTX for newer chips
  endif()
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # CUDA::cudart_static, where it is needed
  enable_language(CUDA)
  find_package(CUDAToolkit 12.5 REQUIRED)
endif()
