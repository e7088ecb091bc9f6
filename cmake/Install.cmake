# cmake --install: library, headers, programs, CMake package, pkg-config file. Everything in the
# installed tree finds the rest relative to itself, so that it may be moved.

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/crossdock)

install(TARGETS crossdock crossdock_transformer_engine EXPORT crossdockTargets)
install(DIRECTORY include/crossdock DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN *.h)
if(TARGET crossdock-run)
  install(TARGETS crossdock-run)
endif()
if(TARGET crossdock-bench)
  file(RELATIVE_PATH xd_bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(crossdock-bench PROPERTIES INSTALL_RPATH "$ORIGIN/${xd_bin_to_lib}")
  install(TARGETS crossdock-bench)
endif()

install(EXPORT crossdockTargets NAMESPACE crossdock:: DESTINATION ${package_dir})
configure_package_config_file(cmake/crossdockConfig.cmake.in
  ${PROJECT_BINARY_DIR}/crossdockConfig.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/crossdockConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/crossdockConfig.cmake
  ${PROJECT_BINARY_DIR}/crossdockConfigVersion.cmake
  cmake/DLPackHeader.cmake
  DESTINATION ${package_dir})

file(RELATIVE_PATH xd_pc_prefix
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
set(xd_pc_dlpack)
if(NOT DLPACK_INCLUDE_DIR IN_LIST CMAKE_C_IMPLICIT_INCLUDE_DIRECTORIES)
  set(xd_pc_dlpack -I${DLPACK_INCLUDE_DIR})
endif()
configure_file(cmake/crossdock.pc.in crossdock.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/crossdock.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
