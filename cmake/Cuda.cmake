# Decides whether the CUDA executor is built: XD_CUDA. ON asks for it by name; AUTO builds it where
# an NVIDIA device is, since elsewhere the kernels are most of the compiling and nothing can run
# them. The runtime is linked statically and the driver is looked up at run time, so that the
# library also starts on machines without a driver.

include(${CMAKE_CURRENT_LIST_DIR}/CudaVersion.cmake)

set(XD_CUDA OFF)
if(NOT CROSSDOCK_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "CROSSDOCK_CUDA = ${CROSSDOCK_CUDA}, expected AUTO, ON or OFF")
endif()
if(CROSSDOCK_CUDA STREQUAL "ON")
  set(XD_CUDA ON)
elseif(CROSSDOCK_CUDA STREQUAL "AUTO" AND NOT CROSSDOCK_SANITIZE)  # sanitizers look at host code
  xd_nvidia_device(/dev xd_device)
  if(xd_device)
    include(CheckLanguage)
    check_language(CUDA)
    # An old one often does not get along with a new C++ compiler: it is named all the same.
    set(xd_nvcc ${CMAKE_CUDA_COMPILER})
    if(NOT xd_nvcc)
      find_program(XD_NVCC NAMES $ENV{CUDACXX} nvcc PATHS /usr/local/cuda/bin)
      set(xd_nvcc ${XD_NVCC})
    endif()
    xd_cuda_obstacle("${xd_nvcc}" xd_cuda_obstacle)
    if(NOT xd_cuda_obstacle AND NOT CMAKE_CUDA_COMPILER)
      set(xd_cuda_obstacle "${xd_nvcc} cannot compile with this C++ compiler")
    endif()
  else()
    set(xd_cuda_obstacle "no NVIDIA device on this machine, CROSSDOCK_CUDA=ON builds for others")
  endif()
  if(xd_cuda_obstacle)
    message(STATUS "${xd_cuda_obstacle}: not built is the CUDA executor")
  else()
    message(STATUS "${xd_device} found: the CUDA executor is built by ${xd_nvcc}")
    set(XD_CUDA ON)
  endif()
endif()

if(XD_CUDA)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # CUDA::cudart_static, where it is needed
  set(xd_given_architectures ${CMAKE_CUDA_ARCHITECTURES})
  if(NOT xd_given_architectures)
    set(CMAKE_CUDA_ARCHITECTURES 90-real)  # of the compiler's own tests
  endif()
  enable_language(CUDA)
  if(NOT xd_given_architectures)
    xd_cuda_architectures(
      ${CMAKE_CUDA_COMPILER_VERSION} ${CROSSDOCK_CUDA_EVERY_CHIP} CMAKE_CUDA_ARCHITECTURES)
    if(100-real IN_LIST CMAKE_CUDA_ARCHITECTURES)
      set(XD_CUDA_COMPRESS ON)  # a sixth of the bytes; drivers from CUDA 12.4 on read it
    endif()
  endif()
  find_package(CUDAToolkit ${XD_CUDA_LEAST} REQUIRED)
endif()
