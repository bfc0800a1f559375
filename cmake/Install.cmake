# What `cmake --install` and `cpack` put where. Two components: `runtime` is the programs with what an operator needs;
# `development` is the client library and the ops for other CMake projects, with find_package(logitd).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# runtime
install(TARGETS logitd logitctl load_bench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
add_custom_command(TARGET logitctl POST_BUILD VERBATIM
                   COMMAND sh -c "\"$0\" completion bash > \"$1\"" $<TARGET_FILE:logitctl> ${CMAKE_BINARY_DIR}/logitctl.bash)
install(FILES ${CMAKE_BINARY_DIR}/logitctl.bash RENAME logitctl
        DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT runtime)
install(TARGETS logitd_c LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT development)
install(FILES deploy/systemd/logitd.service DESTINATION lib/systemd/system COMPONENT runtime)
install(FILES README.md docs/operations.md docs/security.md docs/semantics.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT runtime)
install(FILES LICENSE RENAME copyright DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT runtime)

# development
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/logitd)
set_target_properties(logitd_kernels PROPERTIES EXPORT_NAME kernels)
set_target_properties(logitd_client PROPERTIES EXPORT_NAME client)
set_target_properties(logitd_proto PROPERTIES EXPORT_NAME proto)
set_target_properties(logitd_grpc PROPERTIES EXPORT_NAME grpc)
set_target_properties(logitd_formats PROPERTIES EXPORT_NAME formats)
# Two sets, so that users of the ops need neither gRPC nor protobuf.
install(TARGETS logitd_kernels EXPORT logitdKernels COMPONENT development
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/logitd)
install(TARGETS logitd_client logitd_grpc logitd_proto logitd_formats EXPORT logitdClient COMPONENT development
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/logitd ${CMAKE_INSTALL_INCLUDEDIR})
foreach(part Kernels Client)
  install(EXPORT logitd${part} NAMESPACE logitd:: DESTINATION ${package_dir} COMPONENT development)
endforeach()
if(LOGITD_CUDA)
  install(FILES ${CUDA_cudart_static_LIBRARY} DESTINATION ${CMAKE_INSTALL_LIBDIR}/logitd COMPONENT development)
endif()
foreach(dir client kernels)
  install(DIRECTORY ${dir} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/logitd COMPONENT development
          FILES_MATCHING PATTERN "*.h"
          PATTERN c_api EXCLUDE PATTERN cli EXCLUDE PATTERN python EXCLUDE PATTERN transport EXCLUDE PATTERN messages EXCLUDE PATTERN calls EXCLUDE PATTERN cpu EXCLUDE PATTERN cuda EXCLUDE)
endforeach()
install(DIRECTORY ${CMAKE_BINARY_DIR}/proto/logitd DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
        FILES_MATCHING PATTERN "*.h")
install(DIRECTORY proto/logitd DESTINATION ${CMAKE_INSTALL_DATADIR}/logitd/proto COMPONENT development
        FILES_MATCHING PATTERN "*.proto")
configure_package_config_file(cmake/logitdConfig.cmake.in ${CMAKE_BINARY_DIR}/logitdConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/logitdConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/logitdConfig.cmake ${CMAKE_BINARY_DIR}/logitdConfigVersion.cmake
        DESTINATION ${package_dir} COMPONENT development)

# cpack: a tarball and a .deb for each component
set(CPACK_GENERATOR TGZ DEB)
set(CPACK_PACKAGE_VENDOR logitd)
set(CPACK_PACKAGE_CONTACT "logitd <logitd@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Sampling and scoring of logits as a gRPC service")
set(CPACK_RESOURCE_FILE_LICENSE ${CMAKE_SOURCE_DIR}/LICENSE)
set(CPACK_COMPONENTS_ALL runtime development)
set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_PROJECT_CONFIG_FILE ${CMAKE_SOURCE_DIR}/cmake/PackageOptions.cmake)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS  # a strict umask of the builder is not the user's
    OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME logitd)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS bash-completion)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA
    ${CMAKE_SOURCE_DIR}/deploy/debian/postinst ${CMAKE_SOURCE_DIR}/deploy/debian/prerm ${CMAKE_SOURCE_DIR}/deploy/debian/postrm)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME liblogitd-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "logitd (= ${PROJECT_VERSION}), libgrpc++-dev, protobuf-compiler-grpc, libprotobuf-dev, libssl-dev, libabsl-dev, libhwy-dev")
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION
    "The server logitd, its command line logitctl and its load generator, with a systemd unit; liblogitd, the ops for other languages.")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "The C++ client and the ops as libraries, for find_package(logitd).")
include(CPack)
