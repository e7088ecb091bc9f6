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
