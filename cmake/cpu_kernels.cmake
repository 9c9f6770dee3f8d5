# Target `flowtt_cpu_kernels`: torch-free CPU kernels.

add_library(flowtt_cpu_kernels OBJECT
  csrc/cpu/simple_kernels.cpp)
target_include_directories(flowtt_cpu_kernels PRIVATE csrc)
target_compile_options(flowtt_cpu_kernels PRIVATE -O3 -Wall -Wextra)
