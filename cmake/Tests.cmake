# How tests are declared. Their time limits are for a quiet machine; what is enforced is a multiple,
# since it only has to end tests that hang: machines differ, may be busy, and sanitizers are slow.

find_package(GTest REQUIRED)
find_package(Python3 REQUIRED COMPONENTS Interpreter)
include(GoogleTest)
include(ProcessorCount)
ProcessorCount(xd_cores)

if(CROSSDOCK_SANITIZE)
  set(xd_time_factor 20)
else()
  set(xd_time_factor 4)
endif()
math(EXPR xd_unit_timeout "60 * ${xd_time_factor}")

# xd_test(<name> LABEL <label> [TIMEOUT <seconds>] [CORES <n>] COMMAND <command>...): `make test`
# has two of CTest's places a core. Tests of faults and of networks wait for most of their time and
# take one for each of their cores; all others take two.
function(xd_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LABEL;TIMEOUT;CORES" "COMMAND")
  xd_default(arg_TIMEOUT 60)
  xd_default(arg_CORES 1)
  math(EXPR timeout "${arg_TIMEOUT} * ${xd_time_factor}")
  set(places ${arg_CORES})
  if(NOT arg_LABEL MATCHES "^(faults|net)$")
    math(EXPR places "2 * ${arg_CORES}")
  endif()
  add_test(NAME ${name} COMMAND ${arg_COMMAND})
  set_tests_properties(${name} PROPERTIES
    LABELS ${arg_LABEL} TIMEOUT ${timeout} PROCESSORS ${places} SKIP_RETURN_CODE 77)
  if(arg_LABEL STREQUAL "gpu")  # each launch takes all devices
    set_tests_properties(${name} PROPERTIES RESOURCE_LOCK gpu)
  endif()
endfunction()

# xd_rank_test(<name> LABEL <label> [RANKS <n>...] [HOSTS <hosts>...] [KINDS processes|threads...]
#   [TIMEOUT <seconds>] [ENVIRONMENT <variable=value>...] COMMAND <target> <argument>...): one
# launch per kind and number of ranks, <name>.<kind>.<n>, or hosts as crossdock-run takes them,
# <name>.<kind>.<hosts>.
# More ranks than cores is normal, and ranks wait for half of their time: a launch takes half of the
# cores that it could use.
# ThreadSanitizer sees one process only, so its ranks are threads.
function(xd_rank_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LABEL;TIMEOUT"
    "RANKS;HOSTS;KINDS;ENVIRONMENT;COMMAND")
  xd_default(arg_TIMEOUT 60)
  xd_default(arg_KINDS processes threads)
  if(CROSSDOCK_SANITIZE STREQUAL "thread")
    list(REMOVE_ITEM arg_KINDS processes)
  endif()
  list(POP_FRONT arg_COMMAND program)
  math(EXPR limit "${arg_TIMEOUT} * ${xd_time_factor} - 5")
  foreach(kind ${arg_KINDS})
    set(option)
    if(kind STREQUAL "threads")
      set(option --threads)
    endif()
    foreach(launch ${arg_RANKS} ${arg_HOSTS})
      string(REPLACE "," "-" launch_name ${launch})
      set(size -n ${launch})
      set(cores ${launch})
      if(launch IN_LIST arg_HOSTS)
        set(size --hosts ${launch})
        set(cores 4)
      endif()
      if(xd_cores AND cores GREATER xd_cores)
        set(cores ${xd_cores})
      endif()
      math(EXPR cores "(${cores} + 1) / 2")
      xd_test(${name}.${kind}.${launch_name} LABEL ${arg_LABEL} TIMEOUT ${arg_TIMEOUT}
        CORES ${cores} COMMAND crossdock-run ${size} ${option} --timeout ${limit}
          -- $<TARGET_FILE:${program}> ${arg_COMMAND})
      set_tests_properties(${name}.${kind}.${launch_name} PROPERTIES
        ENVIRONMENT "${arg_ENVIRONMENT}")
      if(arg_ENVIRONMENT MATCHES XD_NET_TEST)  # see tests/support/instruments.h
        set_tests_properties(${name}.${kind}.${launch_name} PROPERTIES
          REQUIRED_FILES $<TARGET_SONAME_FILE:crossdock-instrumented>)
      endif()
    endforeach()
  endforeach()
endfunction()

# xd_full_only(<test>...): launches of which others say nearly the same. `make test` leaves them to
# `make test FULL=1` and `make sanitize`.
function(xd_full_only)
  foreach(test ${ARGN})
    if(TEST ${test})
      set_property(TEST ${test} APPEND PROPERTY LABELS full)
    endif()
  endforeach()
endfunction()

# Sets a variable of the caller that has no value yet.
macro(xd_default variable)
  if(NOT ${variable})
    set(${variable} ${ARGN})
  endif()
endmacro()

# xd_quick_library(<target>...): optimised as libraries are, though it is a part of tests.
function(xd_quick_library)
  foreach(target ${ARGN})
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:C,CXX>:-O2>")
  endforeach()
endfunction()

# xd_see_the_api_alone(<target>...): see cmake/Targets.cmake.
function(xd_see_the_api_alone)
  set_target_properties(${ARGN} PROPERTIES XD_SEES_THE_API_ALONE ON)
endfunction()

# xd_share_gtest_header(): precompiles GoogleTest's header, which takes longer to read than most
# tests, for all programs of this folder and its folders that use it.
function(xd_share_gtest_header)
  foreach(header xd_gtest_header xd_gtest_header_api)
    file(CONFIGURE OUTPUT ${header}.cc CONTENT "// Carries the precompiled header.\n")
    add_library(${header} OBJECT EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/${header}.cc)
    target_link_libraries(${header} PRIVATE xd_build GTest::gtest)
    target_precompile_headers(${header} PRIVATE <gtest/gtest.h>)
    target_compile_options(${header} PRIVATE -fpch-preprocess)  # so that ccache keeps objects
  endforeach()
  xd_see_the_api_alone(xd_gtest_header_api)
  get_property(folders DIRECTORY PROPERTY SUBDIRECTORIES)
  foreach(folder . ${folders})
    get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
    foreach(target ${targets})
      get_target_property(type ${target} TYPE)
      get_target_property(libraries ${target} LINK_LIBRARIES)
      get_target_property(sources ${target} SOURCES)
      get_target_property(api ${target} XD_SEES_THE_API_ALONE)
      if(type STREQUAL EXECUTABLE
          AND libraries MATCHES "GTest::|xd_batches|xd_families|xd_test_main"
          AND NOT sources MATCHES "\\.c(;|$)")  # C has a precompiled header of its own
        set(header xd_gtest_header)
        if(api)
          string(APPEND header _api)
        endif()
        target_precompile_headers(${target} REUSE_FROM ${header})
        target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
      endif()
    endforeach()
  endforeach()
endfunction()
