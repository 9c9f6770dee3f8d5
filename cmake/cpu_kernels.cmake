# Target `flowtt_cpu_kernels`: torch-free CPU kernels. On x86-64 the vectorised part is compiled for
# three instruction sets, and the library chooses at run time.

add_library(flowtt_cpu_kernels OBJECT
  csrc/cpu/backward.cpp
  csrc/cpu/bag_gradients.cpp
  csrc/cpu/forward.cpp
  csrc/cpu/kernel_choice.cpp
  csrc/cpu/lookup_chunks.cpp
  csrc/cpu/lookup_grouping.cpp
  csrc/cpu/slice_gradient_sums.cpp
  csrc/cpu/weights_grad.cpp
  csrc/cpu/work_division.cpp)
target_include_directories(flowtt_cpu_kernels PRIVATE csrc)
target_compile_options(flowtt_cpu_kernels PRIVATE -O3 -Wall -Wextra)

# sqrt without errno and no trapping let loops vectorise; results stay IEEE. GCC 12 warns about its own
# AVX-512 headers otherwise.
set(FLOWTT_SIMD_FLAGS -O3 -Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized -fno-math-errno -fno-trapping-math
  -ffp-contract=fast)

function(flowtt_add_cpu_level level)
  add_library(flowtt_cpu_${level} OBJECT csrc/cpu/simd/kernels.cpp)
  target_include_directories(flowtt_cpu_${level} PRIVATE csrc)
  target_compile_definitions(flowtt_cpu_${level} PRIVATE FLOWTT_CPU_LEVEL=${level})
  target_compile_options(flowtt_cpu_${level} PRIVATE ${FLOWTT_SIMD_FLAGS} ${ARGN})
  target_sources(flowtt_cpu_kernels INTERFACE $<TARGET_OBJECTS:flowtt_cpu_${level}>)
endfunction()

flowtt_add_cpu_level(baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_compile_definitions(flowtt_cpu_kernels PRIVATE FLOWTT_X86_LEVELS)
  flowtt_add_cpu_level(avx2 -mavx2 -mfma -mf16c)
  flowtt_add_cpu_level(avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl
    -mprefer-vector-width=512)
endif()
