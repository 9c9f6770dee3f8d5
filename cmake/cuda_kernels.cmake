# Adds the CUDA kernels to the target `torchrec_flowtt`, when there are any and a compiler is found.
# Sources: every csrc/cuda/*.cu (torch-free kernels) and csrc/bindings_cuda.cpp (registration) with
# csrc/packed_cores.cpp and csrc/tiled_features.cpp.

file(GLOB FLOWTT_CUDA_SOURCES CONFIGURE_DEPENDS
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/*.cu")

if(FLOWTT_CUDA STREQUAL "OFF")
  message(STATUS "CUDA kernels: off (FLOWTT_CUDA=OFF)")
  return()
endif()
include(CheckLanguage)
# check_language remembers that it found nothing; nvcc may have been installed since.
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(FLOWTT_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "FLOWTT_CUDA=ON, but no CUDA compiler was found. Put nvcc on PATH or set CUDACXX.")
  endif()
  message(STATUS "CUDA kernels: off (no nvcc found; put it on PATH or set CUDACXX to build them)")
  return()
endif()
if(NOT FLOWTT_CUDA_SOURCES OR NOT EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/bindings_cuda.cpp")
  message(STATUS "CUDA kernels: off (no sources in csrc/cuda)")
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES "${FLOWTT_CUDA_ARCHS}")
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
message(STATUS "CUDA kernels: ${CMAKE_CUDA_COMPILER} for architectures ${FLOWTT_CUDA_ARCHS}")

# Products of four warps together are instructions of sm_90a, which no other device runs, so the
# kernels that use them are compiled for it alone.
set(flowtt_sm90a_sources "${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/tiled_backward_groups.cu")
set(flowtt_kernel_libraries flowtt_cuda_kernels)
if("90" IN_LIST FLOWTT_CUDA_ARCHS)
  list(REMOVE_ITEM FLOWTT_CUDA_SOURCES ${flowtt_sm90a_sources})
  add_library(flowtt_cuda_sm90a_kernels OBJECT ${flowtt_sm90a_sources})
  list(APPEND flowtt_kernel_libraries flowtt_cuda_sm90a_kernels)
endif()
add_library(flowtt_cuda_kernels OBJECT ${FLOWTT_CUDA_SOURCES})
foreach(library IN LISTS flowtt_kernel_libraries)
  target_include_directories(${library} PRIVATE csrc)
  set_target_properties(${library} PROPERTIES
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_VISIBILITY_PRESET hidden
    CUDA_RUNTIME_LIBRARY Static)
  target_compile_options(${library} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo>)
  if(TARGET flowtt_cuda_sm90a_kernels)
    target_compile_definitions(${library} PRIVATE FLOWTT_GROUPED_BACKWARD)
  endif()
endforeach()
if(TARGET flowtt_cuda_sm90a_kernels)
  set_target_properties(flowtt_cuda_sm90a_kernels PROPERTIES CUDA_ARCHITECTURES 90a-real)
endif()

add_library(flowtt_cuda_bindings OBJECT
  csrc/bindings_cuda.cpp csrc/packed_cores.cpp csrc/tiled_features.cpp)
target_include_directories(flowtt_cuda_bindings PRIVATE csrc)
target_compile_definitions(flowtt_cuda_bindings PRIVATE USE_CUDA)
target_link_libraries(flowtt_cuda_bindings PRIVATE stable_torch CUDA::cudart_static)

target_link_libraries(torchrec_flowtt PRIVATE
  ${flowtt_kernel_libraries} flowtt_cuda_bindings CUDA::cudart_static)
set_target_properties(torchrec_flowtt PROPERTIES CUDA_RUNTIME_LIBRARY Static)
