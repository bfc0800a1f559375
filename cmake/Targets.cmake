# How a directory becomes a target. CMake finds sources by pattern: a new file joins its directory's target.
include(GoogleTest)

function(logitd_compile_options target)
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}>)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror;-Wno-unused-parameter;-Wno-missing-field-initializers>
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-error=deprecated-declarations>  # a newer library may deprecate what an old one needs
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>  # false alarms of gcc 12 at -O3 for "text" + string
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-error=maybe-uninitialized>  # false alarms of gcc 16 for absl::InlinedVector
    $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings;-Xcompiler=-Wall;--expt-relaxed-constexpr>)
  # Compressed kernels take a tenth of the space in every program; the driver unpacks them at their first use.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  endif()
  # ThreadSanitizer learns of the locks of libraries that are built without it (tests/tsan). They do not get instrumented
  # copies of inline functions from our archives: each of their uses would be a race.
  get_target_property(type ${target} TYPE)
  if(LOGITD_SANITIZE STREQUAL "thread" AND type STREQUAL "EXECUTABLE")
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:logitd_tsan>)
    set(ours log formats kernels engine ops door http2 arena proto grpc rpc server client)
    list(TRANSFORM ours REPLACE "(.+)" "liblogitd_\\1.a")
    list(JOIN ours ":" ours)
    target_link_options(${target} PRIVATE "LINKER:--export-dynamic-symbol=*absl*Notification*"
                        "LINKER:--exclude-libs=${ours}")
    target_link_libraries(${target} PRIVATE absl::synchronization ${CMAKE_DL_LIBS})
  endif()
endfunction()

# logitd_glob(out PATTERN dir...): the files of directories; "dir/**" stands for the directory and all below it.
function(logitd_glob out pattern)
  set(found)
  foreach(dir ${ARGN})
    set(how GLOB)
    if(dir MATCHES "^(.*)/\\*\\*$")
      set(dir ${CMAKE_MATCH_1})
      set(how GLOB_RECURSE)
    endif()
    file(${how} sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${dir}/${pattern})
    list(APPEND found ${sources})
  endforeach()
  set(${out} ${found} PARENT_SCOPE)
endfunction()

# logitd_library(name SOURCES dir... [EXCEPT file...])
function(logitd_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;EXCEPT" ${ARGN})
  logitd_glob(sources *.cc ${ARG_SOURCES})
  foreach(except ${ARG_EXCEPT})
    list(FILTER sources EXCLUDE REGEX "/${except}$")
  endforeach()
  add_library(${name} STATIC ${sources})
  target_compile_features(${name} PUBLIC cxx_std_20)
  logitd_compile_options(${name})
endfunction()

# logitd_shared_library(name output abi dir map): lib<output>.so.<abi> of a directory. It exports what `map`, a version
# script, names; our other libraries are inside.
function(logitd_shared_library name output abi dir map)
  logitd_glob(sources *.cc ${dir})
  add_library(${name} SHARED ${sources})
  target_compile_features(${name} PUBLIC cxx_std_20)
  logitd_compile_options(${name})
  # In a wheel it has Abseil and Highway beside it. An RPATH, because the libraries of those are found by it too.
  set_target_properties(${name} PROPERTIES OUTPUT_NAME ${output} SOVERSION ${abi} VERSION ${abi}.0 INSTALL_RPATH "$ORIGIN"
                        BUILD_WITH_INSTALL_RPATH ON LINK_DEPENDS ${CMAKE_SOURCE_DIR}/${map})
  target_link_options(${name} PRIVATE "LINKER:--version-script=${CMAKE_SOURCE_DIR}/${map}" LINKER:-Bsymbolic
                      LINKER:--disable-new-dtags)
  if(NOT LOGITD_SANITIZE AND NOT LOGITD_FUZZ)  # whose runtimes are in the program
    target_link_options(${name} PRIVATE LINKER:--no-undefined)
  endif()
endfunction()

# The headers that most of these targets' time goes into, read once for all of them, if LOGITD_PRECOMPILE says so. gcc
# takes them only for the same flags, so programs are compiled as libraries are.
function(logitd_precompile first)
  if(LOGITD_PRECOMPILE)
    target_precompile_headers(${first} PRIVATE <grpcpp/grpcpp.h> <google/protobuf/message.h> <absl/status/statusor.h>
                                               <absl/strings/str_format.h> <absl/time/time.h> <string> <vector>)
    foreach(target ${ARGN})
      target_precompile_headers(${target} REUSE_FROM ${first})
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
    endforeach()
  endif()
endfunction()

# logitd_executable(name SOURCES dir...)
function(logitd_executable name)
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  logitd_glob(sources *.cc ${ARG_SOURCES})
  add_executable(${name} ${sources})
  logitd_compile_options(${name})
endfunction()

# Adds the .cu files of directories to a target, and the .cc files that it does not have yet, and tells its users that
# CUDA is built in. A file without device code is a .cc: nvcc takes it once for each architecture, and five times as long.
function(logitd_cuda_sources name)
  logitd_glob(sources *.cu ${ARGN})
  logitd_glob(host *.cc ${ARGN})
  get_target_property(known ${name} SOURCES)
  list(REMOVE_ITEM host ${known})
  target_sources(${name} PRIVATE ${sources} ${host})
  target_compile_definitions(${name} PUBLIC LOGITD_WITH_CUDA=1)
  # An installed library finds the runtime beside it: its users need no toolkit (logitdConfig.cmake).
  target_link_libraries(${name} PUBLIC $<BUILD_INTERFACE:CUDA::cudart_static> $<INSTALL_INTERFACE:logitd::cudart_static>)
endfunction()

# Generates C++ and gRPC code for every proto/logitd/v1/*.proto.
function(logitd_proto_library messages stubs dir)
  file(GLOB protos CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR}/${dir} ${CMAKE_SOURCE_DIR}/${dir}/logitd/v1/*.proto
       ${CMAKE_SOURCE_DIR}/${dir}/grpc/*/*/*.proto)
  set(out ${CMAKE_BINARY_DIR}/proto)
  file(MAKE_DIRECTORY ${out})
  foreach(proto ${protos})
    string(REGEX REPLACE "\\.proto$" "" base ${proto})
    add_custom_command(
      OUTPUT ${out}/${base}.pb.cc ${out}/${base}.pb.h
      COMMAND protobuf::protoc -I ${CMAKE_SOURCE_DIR}/${dir} --cpp_out=${out} ${proto}
      DEPENDS ${CMAKE_SOURCE_DIR}/${dir}/${proto})
    list(APPEND message_sources ${out}/${base}.pb.cc)
    if(NOT proto MATCHES "^logitd/")
      continue()
    endif()
    add_custom_command(
      OUTPUT ${out}/${base}.grpc.pb.cc ${out}/${base}.grpc.pb.h
      COMMAND protobuf::protoc -I ${CMAKE_SOURCE_DIR}/${dir} --grpc_out=${out}
              --plugin=protoc-gen-grpc=$<TARGET_FILE:gRPC::grpc_cpp_plugin> ${proto}
      DEPENDS ${CMAKE_SOURCE_DIR}/${dir}/${proto})
    list(APPEND stub_sources ${out}/${base}.grpc.pb.cc)
  endforeach()
  add_library(${messages} STATIC ${message_sources})
  target_include_directories(${messages} SYSTEM PUBLIC $<BUILD_INTERFACE:${out}>)
  target_link_libraries(${messages} PUBLIC protobuf::libprotobuf)
  add_library(${stubs} STATIC ${stub_sources})
  if(LOGITD_PRECOMPILE)  # what gRPC generates goes through the compiler as one file
    set_target_properties(${stubs} PROPERTIES UNITY_BUILD ON)
  endif()
  target_link_libraries(${stubs} PUBLIC ${messages} gRPC::grpc++)
endfunction()

# The messages and client stubs of one proto of the tests.
function(logitd_interop_library name proto)
  set(out ${CMAKE_BINARY_DIR}/interop)
  file(MAKE_DIRECTORY ${out})
  get_filename_component(base ${proto} NAME_WE)
  get_filename_component(dir ${CMAKE_SOURCE_DIR}/${proto} DIRECTORY)
  add_custom_command(
    OUTPUT ${out}/${base}.pb.cc ${out}/${base}.pb.h ${out}/${base}.grpc.pb.cc ${out}/${base}.grpc.pb.h
    COMMAND protobuf::protoc -I ${dir} --cpp_out=${out} --grpc_out=${out}
            --plugin=protoc-gen-grpc=$<TARGET_FILE:gRPC::grpc_cpp_plugin> ${base}.proto
    DEPENDS ${CMAKE_SOURCE_DIR}/${proto})
  add_library(${name} STATIC ${out}/${base}.pb.cc ${out}/${base}.grpc.pb.cc)
  target_include_directories(${name} SYSTEM PUBLIC ${out})
  target_link_libraries(${name} PUBLIC gRPC::grpc++)
endfunction()

# Embeds the descriptors of every proto, with their comments, into `source` of a target: it sees the file's name as
# LOGITD_DESCRIPTORS.
function(logitd_embed_descriptors target dir source)
  file(GLOB protos CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${dir}/logitd/v1/*.proto)
  set(out ${CMAKE_BINARY_DIR}/proto/descriptors.bin)
  add_custom_command(
    OUTPUT ${out}
    COMMAND protobuf::protoc -I ${CMAKE_SOURCE_DIR}/${dir} --include_imports --include_source_info
            --descriptor_set_out=${out} ${protos}
    DEPENDS ${protos})
  set_source_files_properties(${CMAKE_SOURCE_DIR}/${source} PROPERTIES OBJECT_DEPENDS ${out}
                              COMPILE_DEFINITIONS LOGITD_DESCRIPTORS="${out}")
  target_sources(${target} PRIVATE ${out})
endfunction()

# `chrt --idle` is left out where the system does not allow it.
find_program(LOGITD_CHRT chrt)
if(LOGITD_CHRT)
  execute_process(COMMAND ${LOGITD_CHRT} --idle 0 true RESULT_VARIABLE LOGITD_CHRT_FAILS OUTPUT_QUIET ERROR_QUIET)
endif()

# One binary per test directory; tests/<dir>/*_gpu_test.cc become <dir>_gpu_test, labelled gpu.
function(logitd_test dir)
  logitd_glob(all *.cc tests/${dir})
  set(gpu ${all})
  list(FILTER all EXCLUDE REGEX "_gpu_test\\.cc$")
  list(FILTER gpu INCLUDE REGEX "_gpu_test\\.cc$")
  foreach(kind cpu gpu)
    if(kind STREQUAL cpu)
      set(name ${dir}_test)
      set(sources ${all})
    elseif(LOGITD_CUDA AND gpu)
      set(name ${dir}_gpu_test)
      set(sources ${gpu})
    else()
      continue()
    endif()
    if(NOT sources)
      continue()
    endif()
    add_executable(${name} ${sources})
    logitd_compile_options(${name})
    target_link_libraries(${name} PRIVATE ${ARGN} GTest::gmock GTest::gtest_main)
    target_compile_definitions(${name} PRIVATE LOGITD_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
    if(NOT dir STREQUAL "kernels")  # only those compute much
      target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
    elseif(LOGITD_SANITIZE)
      target_compile_options(${name} PRIVATE -O2)
    endif()
    if(LOGITD_PRECOMPILE AND kind STREQUAL "cpu")
      set(grpc)
      if(dir MATCHES "^(rpc|client|e2e)$")
        set(grpc <grpcpp/grpcpp.h> <google/protobuf/message.h>)
      endif()
      target_precompile_headers(${name} PRIVATE <gtest/gtest.h> <gmock/gmock.h> <absl/time/time.h> <string> <vector> ${grpc})
    endif()
    # kernels_test computes for minutes. scripts/test runs the other tests beside it, which mostly wait, and go first.
    set(before)
    if(name STREQUAL "kernels_test")
      set(before nice -n 19)
      if(LOGITD_SANITIZE AND LOGITD_CHRT AND NOT LOGITD_CHRT_FAILS)
        set(before ${LOGITD_CHRT} --idle 0)
      endif()
    endif()
    add_test(NAME ${name} COMMAND ${before} $<TARGET_FILE:${name}>)
    set_tests_properties(${name} PROPERTIES LABELS "${kind};${dir}" TIMEOUT 2400
      SKIP_REGULAR_EXPRESSION "no CUDA device: every test skipped")
    if(dir MATCHES "^(engine|rpc|e2e)$")
      set_tests_properties(${name} PROPERTIES RESOURCE_LOCK time)  # it measures short times: not two of them at once
    endif()
    if(kind STREQUAL "gpu")
      set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)  # it measures the device's memory
    endif()
  endforeach()
endfunction()

# tests/fuzz/<name>_fuzz.cc -> <name>_fuzz under libFuzzer. An ordinary test also replays the corpus next to it.
function(logitd_fuzz_targets dir)
  if(NOT LOGITD_FUZZ)
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${dir}/*_fuzz.cc)
  foreach(source ${sources})
    get_filename_component(name ${source} NAME_WE)
    add_executable(${name} ${source})
    logitd_compile_options(${name})
    target_compile_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_libraries(${name} PRIVATE ${ARGN})
    add_test(NAME ${name} COMMAND ${name} -runs=200000 -max_total_time=60
             ${CMAKE_BINARY_DIR}/corpus_${name} ${CMAKE_SOURCE_DIR}/${dir}/corpus/${name})
    file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/corpus_${name})
    set_tests_properties(${name} PROPERTIES LABELS "fuzz")
  endforeach()
endfunction()
