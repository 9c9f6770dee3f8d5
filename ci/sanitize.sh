#!/usr/bin/env bash
# Runs the CUDA kernels under compute-sanitizer and writes what each tool found:
#
#     bash ci/sanitize.sh docs/performance/h200/sanitizers.txt
#
# Needs a GPU, and what tests/gpu/README.md says. The four tools run side by side, each on tests that
# reach every kernel. The exit status is 1 if a tool found something or a test failed, or if a tool
# did not come to its end. SECONDS_A_TOOL bounds each (default 600); WORKERS_A_TOOL is how many
# processes share its tests (default 4, with pytest-xdist); TOOLS names some of the four, as 16
# processes are slow where there are few CPUs; PYTHON names the interpreter. Complete output is kept
# in the folder of the log, as TOOL.log.
set -uo pipefail
cd "$(dirname "$0")/.."
log=$(realpath -m "${1:?usage: ci/sanitize.sh LOG}")
folder=${SANITIZER_LOGS:-$(dirname "$log")}
mkdir -p "$folder" "$(dirname "$log")"

small="two or three or four"  # cores
backward="test_pooling and 1 and tiled_backward or test_16_bit_cores or test_features_that_share_tables or test_blocks or test_skew or test_steps and float32 or packed and test_same_bits and float32-True"
mechanisms="test_more_rows_than_slots or test_equal_ids or test_pooling_of_equal_ids or test_disabled_mechanisms or test_switched_off and 0-"
# Tests by tool, as pytest's -k has them. Race and initialisation checks are the slow ones.
declare -A chosen=(
  [memcheck]="float32 and (test_tables or test_values and 0-True) or test_empty_and_long_bags or misaligned or test_chunk_sizes or test_tf32 or $mechanisms or test_shapes_for_the_tensor_cores or (test_steps and bfloat16) or $backward"
  [initcheck]="float32 and (test_values and 0-True or test_tables and ($small)) or test_empty_and_long_bags or $mechanisms or test_16_bit_outputs or $backward"
  [racecheck]="float32 and (test_values and 0-False or test_tables and ($small)) or test_tf32 or test_one_prefix or $mechanisms or $backward"
  [synccheck]="float32 and (test_values and 0-False or test_tables and ($small)) or test_tf32 or test_one_prefix or $mechanisms or $backward"
)
declare -A options=(
  [memcheck]="--leak-check no"
  [initcheck]=""
  # Warnings are writes over writes: of lines that are asked for and never read (touch).
  [racecheck]="--kernel-name kns=flowtt --racecheck-detect-level error"
  [synccheck]="--kernel-name kns=flowtt"
)

# Without torch's caching allocator every tensor is an allocation of its own, so that an access past
# its end, or to what was never written, is seen.
run_tool() {
  local tool=$1 start=$SECONDS status
  local command=(compute-sanitizer --tool "$tool" ${options[$tool]} --error-exitcode 9
    "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider tests/gpu
    -n "${WORKERS_A_TOOL:-4}" --dist worksteal -k "${chosen[$tool]}")
  case $tool in memcheck | initcheck) export PYTORCH_NO_CUDA_MEMORY_CACHING=1 ;; esac
  timeout "${SECONDS_A_TOOL:-600}" "${command[@]}" >"$folder/$tool.log" 2>&1
  status=$?
  {
    echo "== $tool"
    echo "command: ${PYTORCH_NO_CUDA_MEMORY_CACHING:+PYTORCH_NO_CUDA_MEMORY_CACHING=1 }$(printf '%q ' "${command[@]}")"
    echo "exit status: $status$([ $status = 124 ] && echo ' (not finished in time)'), $((SECONDS - start)) s"
    grep -E "[0-9]+ (passed|failed|error).* in [0-9.]+s" "$folder/$tool.log" | tail -1
    grep -E "^=========.*SUMMARY|^========= .*(Target application|Error: )" "$folder/$tool.log" | sort | uniq -c | sed 's/^ *//'
    echo
  } >"$folder/$tool.summary"
  return $status
}

read -ra tools <<<"${TOOLS:-memcheck initcheck racecheck synccheck}"
declare -A running
for tool in "${tools[@]}"; do
  (run_tool "$tool") &
  running[$tool]=$!
done
failed=0
for tool in "${tools[@]}"; do wait "${running[$tool]}" || failed=1; done
{
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  compute-sanitizer --version | tail -1
  echo "commit: ${SOURCE_COMMIT:-$(git rev-parse HEAD 2>/dev/null)}"
  echo
  for tool in "${tools[@]}"; do cat "$folder/$tool.summary" && rm "$folder/$tool.summary"; done
} >"$log"
cat "$log"
exit $failed
