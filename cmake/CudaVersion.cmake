# xd_cuda_version(<compiler> <variable>): the release of a CUDA compiler, such as 12.8; empty where
# it does not say.
function(xd_cuda_version compiler variable)
  execute_process(COMMAND ${compiler} --version
    OUTPUT_VARIABLE said ERROR_QUIET RESULT_VARIABLE failed)
  set(version "")
  if(NOT failed AND said MATCHES "release ([0-9]+\\.[0-9]+)")
    set(version ${CMAKE_MATCH_1})
  endif()
  set(${variable} "${version}" PARENT_SCOPE)
endfunction()

# xd_cuda_obstacle(<compiler> <variable>): why a CUDA compiler, which may be empty, cannot build the
# CUDA executor; empty where it can.
set(XD_CUDA_LEAST 12.5)
function(xd_cuda_obstacle compiler variable)
  set(obstacle "")
  if(NOT compiler)
    set(obstacle "nvcc not found")
  else()
    xd_cuda_version(${compiler} version)
    if(NOT version)
      set(obstacle "${compiler} does not tell its version")
    elseif(version VERSION_LESS XD_CUDA_LEAST)
      set(obstacle "nvcc ${version} is older than ${XD_CUDA_LEAST}")
    endif()
  endif()
  set(${variable} "${obstacle}" PARENT_SCOPE)
endfunction()

# xd_cuda_architectures(<release of the compiler> <every chip> <variable>): machine code for Hopper,
# and PTX, which newer chips compile when the library is loaded. With every chip also machine code
# for Blackwell, if the compiler knows it, which takes two thirds as long again.
set(XD_CUDA_LEAST_FOR_BLACKWELL 12.8)
function(xd_cuda_architectures release every_chip variable)
  set(architectures 90-real 90-virtual)
  if(every_chip AND NOT release VERSION_LESS XD_CUDA_LEAST_FOR_BLACKWELL)
    list(APPEND architectures 100-real)
  endif()
  set(${variable} "${architectures}" PARENT_SCOPE)
endfunction()

# xd_nvidia_device(<folder of device files> <variable>): an NVIDIA device's file, such as
# /dev/nvidia0, or WSL's door to one; empty where there is none.
function(xd_nvidia_device folder variable)
  file(GLOB devices ${folder}/nvidia[0-9]* ${folder}/dxg)
  set(${variable} "" PARENT_SCOPE)
  if(devices)
    list(GET devices 0 device)
    set(${variable} ${device} PARENT_SCOPE)
  endif()
endfunction()
