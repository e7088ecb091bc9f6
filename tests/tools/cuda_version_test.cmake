# Which CUDA compilers are good enough, what they compile for, and where a device is:
#   cmake -DFOLDER=<of its own> -P cuda_version_test.cmake
include(${CMAKE_CURRENT_LIST_DIR}/../../cmake/CudaVersion.cmake)

function(expect_obstacle release pattern)
  set(nvcc ${FOLDER}/nvcc-${release})
  file(WRITE ${nvcc}
    "#!/bin/sh\necho 'Cuda compilation tools, release ${release}, V${release}.1'\n")
  file(CHMOD ${nvcc} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  xd_cuda_obstacle(${nvcc} obstacle)
  if(NOT obstacle MATCHES "^${pattern}$")
    message(FATAL_ERROR "nvcc ${release}: '${obstacle}', expected '${pattern}'")
  endif()
endfunction()

expect_obstacle(11.8 "nvcc 11.8 is older than 12.5")
expect_obstacle(12.4 "nvcc 12.4 is older than 12.5")
expect_obstacle(12.5 "")
expect_obstacle(12.10 "")
expect_obstacle(13.0 "")
expect_obstacle(none ".*nvcc-none does not tell its version")
xd_cuda_obstacle("" obstacle)
if(NOT obstacle STREQUAL "nvcc not found")
  message(FATAL_ERROR "no nvcc: '${obstacle}'")
endif()

function(expect_architectures release every_chip expected)
  xd_cuda_architectures(${release} ${every_chip} architectures)
  if(NOT architectures STREQUAL expected)
    message(FATAL_ERROR "nvcc ${release}, every chip ${every_chip}: '${architectures}', "
      "expected '${expected}'")
  endif()
endfunction()

expect_architectures(13.0 OFF "90-real;90-virtual")
expect_architectures(12.6.85 ON "90-real;90-virtual")
expect_architectures(12.8 ON "90-real;90-virtual;100-real")
expect_architectures(12.10.1 ON "90-real;90-virtual;100-real")
expect_architectures(13.0.88 ON "90-real;90-virtual;100-real")

# expect_device(<its file name, or empty> <file>...): in a folder with these files.
function(expect_device name)
  set(devices ${FOLDER}/devices)
  file(REMOVE_RECURSE ${devices})
  file(MAKE_DIRECTORY ${devices})
  foreach(file ${ARGN})
    file(TOUCH ${devices}/${file})
  endforeach()
  xd_nvidia_device(${devices} device)
  get_filename_component(found "${device}" NAME)
  if(NOT found STREQUAL name)
    message(FATAL_ERROR "among '${ARGN}': '${found}', expected '${name}'")
  endif()
endfunction()

expect_device("")
expect_device("" nvidiactl nvidia-uvm null)  # a driver without a device
expect_device(nvidia0 nvidiactl nvidia0 nvidia1)
expect_device(nvidia7 nvidia7)
expect_device(dxg dxg)
