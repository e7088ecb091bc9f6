# crossdock::dlpack: the DLPack header, wherever it is. Used by this build and, installed beside the
# package file, by find_package(crossdock).

find_path(DLPACK_INCLUDE_DIR dlpack/dlpack.h DOC "Directory that holds dlpack/dlpack.h")
if(NOT DLPACK_INCLUDE_DIR)
  message(FATAL_ERROR "dlpack/dlpack.h not found: install libdlpack-dev or set DLPACK_INCLUDE_DIR")
endif()
if(NOT TARGET crossdock::dlpack)
  add_library(crossdock::dlpack INTERFACE IMPORTED)
  set_target_properties(crossdock::dlpack PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES ${DLPACK_INCLUDE_DIR})
endif()
