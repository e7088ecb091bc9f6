# Decides whether the Python extension is built: XD_PYTHON. It needs an interpreter with its headers
# and with nanobind: the one of .venv (tools/setup.sh makes it), else Python_EXECUTABLE, else the
# system's.

set(XD_PYTHON OFF)
if(NOT CROSSDOCK_PYTHON MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "CROSSDOCK_PYTHON = ${CROSSDOCK_PYTHON}, expected AUTO, ON or OFF")
endif()

set(xd_venv_python ${PROJECT_SOURCE_DIR}/.venv/bin/python)
if(CROSSDOCK_PYTHON STREQUAL "ON" OR CROSSDOCK_PYTHON STREQUAL "AUTO" AND NOT CROSSDOCK_SANITIZE)
  if(NOT Python_EXECUTABLE AND EXISTS ${xd_venv_python})
    set(Python_EXECUTABLE ${xd_venv_python} CACHE FILEPATH
      "The interpreter that the extension is built for")
  endif()
  find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
  if(Python_FOUND AND NOT nanobind_ROOT)
    execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
      OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(nanobind_ROOT)
    set(XD_PYTHON ON)
  else()
    set(xd_python_missing
      "Python 3.10 or later with its headers (python3-dev), or its package nanobind,")
    if(CROSSDOCK_PYTHON STREQUAL "ON")
      message(FATAL_ERROR "CROSSDOCK_PYTHON = ON: ${xd_python_missing} is missing")
    endif()
    message(STATUS "${xd_python_missing} not found: the Python extension is not built")
  endif()
endif()
