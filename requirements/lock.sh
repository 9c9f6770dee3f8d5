#!/usr/bin/env bash
# Resolve requirements/*.in into *.lock for Python 3.10 to 3.13. Run through `make lock`, which puts uv on the PATH.
set -euo pipefail
cd "$(dirname "$0")"
compile() { uv pip compile --quiet --universal --upgrade --no-annotate --custom-compile-command "make lock" "$@"; }
compile --python-version 3.10 stack.in | grep -vE '^(torch|triton|fbgemm-gpu|fbgemm-gpu-cpu|cuda-[a-z]+|nvidia-[a-z0-9-]+)==' >stack.lock
compile --python-version 3.10 lint.in -o lint.lock >/dev/null
compile --python-version 3.10 docs.in -o docs.lock >/dev/null
compile --python-version 3.10 plots.in -o plots.lock >/dev/null
# torch-abi-audit needs Python 3.11.
compile --python-version 3.11 audit.in -o audit.lock >/dev/null
