# Adds the CUDA kernels to the target `torchrec_flowtt`, when there are any and a compiler is found.
# Sources: every csrc/cuda/*.cu (torch-free kernels) and csrc/bindings_cuda.cpp (registration) with
# csrc/tiled_features.cpp.

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

add_library(flowtt_cuda_kernels OBJECT ${FLOWTT_CUDA_SOURCES})
target_include_directories(flowtt_cuda_kernels PRIVATE csrc)
set_target_properties(flowtt_cuda_kernels PROPERTIES
  CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_VISIBILITY_PRESET hidden
  CUDA_RUNTIME_LIBRARY Static)
target_compile_options(flowtt_cuda_kernels PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo>)

add_library(flowtt_cuda_bindings OBJECT csrc/bindings_cuda.cpp csrc/tiled_features.cpp)
target_include_directories(flowtt_cuda_bindings PRIVATE csrc)
target_compile_definitions(flowtt_cuda_bindings PRIVATE USE_CUDA)
target_link_libraries(flowtt_cuda_bindings PRIVATE stable_torch CUDA::cudart_static)

target_link_libraries(torchrec_flowtt PRIVATE
  flowtt_cuda_kernels flowtt_cuda_bindings CUDA::cudart_static)
set_target_properties(torchrec_flowtt PROPERTIES CUDA_RUNTIME_LIBRARY Static)
