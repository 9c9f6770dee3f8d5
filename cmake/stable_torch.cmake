# Target `stable_torch`: headers, definitions and libraries of the installed torch, stable ABI only.
# find_package(Torch) is avoided on purpose: it would tie the build to one torch release.

find_package(Python COMPONENTS Interpreter REQUIRED)

if(NOT FLOWTT_TORCH_DIR)
  # Locates the package without importing it, which would take seconds.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE FLOWTT_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
endif()
if(NOT EXISTS "${FLOWTT_TORCH_DIR}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR
    "torch >= 2.11 is needed to build torchrec-flowtt, but ${Python_EXECUTABLE} has none "
    "(looked in '${FLOWTT_TORCH_DIR}'). Install torch there, or set FLOWTT_TORCH_DIR; with pip, "
    "use --no-build-isolation so that the build sees the installed torch.")
endif()
message(STATUS "torch: ${FLOWTT_TORCH_DIR}")

add_library(stable_torch INTERFACE)
target_include_directories(stable_torch SYSTEM INTERFACE "${FLOWTT_TORCH_DIR}/include")
# 0x020b000000000000 is torch 2.11: nothing newer may be used, so that the library serves every
# release from there on.
target_compile_definitions(stable_torch INTERFACE TORCH_TARGET_VERSION=0x020b000000000000)
# libtorch.so is named although no symbol of it is used: in CUDA builds of torch it pulls in
# libtorch_cuda, where the three weak CUDA symbols live (csrc/stable_torch.h).
target_link_options(stable_torch INTERFACE "-L${FLOWTT_TORCH_DIR}/lib")
target_link_libraries(stable_torch INTERFACE
  -Wl,--no-as-needed -ltorch -ltorch_cpu -Wl,--as-needed)
# libtorch_cpu's own dependencies (libc10, libgomp, ...) need not be resolved at link time.
target_link_options(stable_torch INTERFACE -Wl,--allow-shlib-undefined)
