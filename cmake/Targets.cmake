# Options that all targets of this tree share. They are not global: a target gets them by linking
# xd_build.

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Debug, Release, RelWithDebInfo" FORCE)
  endif()
  find_program(CCACHE ccache)
  if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE})
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
  endif()
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)  # clang-tidy reads it
  # Lines for backtraces; describing all types as well takes a quarter of the time to compile.
  string(REGEX REPLACE "-g( |$)" "-g1\\1" CMAKE_C_FLAGS_RELWITHDEBINFO
    "${CMAKE_C_FLAGS_RELWITHDEBINFO}")
  string(REGEX REPLACE "-g( |$)" "-g1\\1" CMAKE_CXX_FLAGS_RELWITHDEBINFO
    "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")
endif()

add_library(xd_build INTERFACE)
target_compile_features(xd_build INTERFACE cxx_std_20 c_std_11)
target_compile_options(xd_build INTERFACE
  "$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow>"
  $<$<AND:$<BOOL:${CROSSDOCK_WERROR}>,$<COMPILE_LANGUAGE:C,CXX>>:-Werror>)
target_include_directories(xd_build INTERFACE ${PROJECT_SOURCE_DIR}/include)

if(CROSSDOCK_SANITIZE STREQUAL "address")
  set(xd_sanitize -fsanitize=address,undefined -fno-sanitize-recover=all
    -fno-omit-frame-pointer -O1 -g1)
elseif(CROSSDOCK_SANITIZE STREQUAL "thread")
  set(xd_sanitize -fsanitize=thread -fno-omit-frame-pointer)
elseif(CROSSDOCK_SANITIZE)
  message(FATAL_ERROR
    "CROSSDOCK_SANITIZE = ${CROSSDOCK_SANITIZE}, expected address, thread or nothing")
endif()
# Programs that see the C API alone are compiled without AddressSanitizer, like those of the plain
# build, whose objects a compiler's cache then has: it is the library that is looked at. (They are
# linked with it, so it knows the memory that they allocate. ThreadSanitizer must see everything.)
define_property(TARGET PROPERTY XD_SEES_THE_API_ALONE
  BRIEF_DOCS "Of the library, the target uses the C API alone")
if(CROSSDOCK_SANITIZE STREQUAL "address")
  set(xd_instrumented $<NOT:$<BOOL:$<TARGET_PROPERTY:XD_SEES_THE_API_ALONE>>>)
else()
  set(xd_instrumented 1)
endif()
target_compile_options(xd_build INTERFACE
  "$<$<AND:$<COMPILE_LANGUAGE:C,CXX>,${xd_instrumented}>:${xd_sanitize}>")
target_link_options(xd_build INTERFACE ${xd_sanitize})

if(XD_CUDA)
  # CMake 3.25 does not know nvcc 13's C++20. Its generated code is not pedantic. Lines of sources
  # are for profilers and sanitizers; they triple the kernels' size, so packages go without.
  target_compile_options(xd_build INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>"
    "$<$<AND:$<BOOL:${CROSSDOCK_BUILD_TESTS}>,$<COMPILE_LANGUAGE:CUDA>>:-lineinfo>"
    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>"
    "$<$<AND:$<BOOL:${XD_CUDA_COMPRESS}>,$<COMPILE_LANGUAGE:CUDA>>:--compress-mode=size>"
    "$<$<AND:$<BOOL:${CROSSDOCK_WERROR}>,$<COMPILE_LANGUAGE:CUDA>>:--Werror=all-warnings>")
endif()

# xd_layer(<name> SOURCES <file>... [DEPENDS <target>...]): one folder of src/ as a static library
# that goes into the shared one. DEPENDS may only name layers below.
function(xd_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPENDS")
  add_library(${name} STATIC ${arg_SOURCES})
  set_target_properties(${name} PROPERTIES
    POSITION_INDEPENDENT_CODE ON VISIBILITY_INLINES_HIDDEN ON
    CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PUBLIC xd_build crossdock::dlpack ${arg_DEPENDS})
endfunction()
