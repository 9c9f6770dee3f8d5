# Everything a developer runs. `make help` lists the targets; `make demo` and `make test` set up what they need.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# The interpreter that makes the virtual environment: the first of these that is Python 3.10 to 3.13.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.10 python3.13; do \
  $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
# cpu or cuda: which builds of torch and FBGEMM are installed, and where the demo runs.
DEVICE ?= cpu
# AUTO builds the CUDA kernels when nvcc is found; ON insists; OFF leaves them out.
FLOWTT_CUDA ?= AUTO
FLOWTT_CUDA_ARCHS ?= 90
# Where a CPU build of torch is looked for besides the configured package index; empty for the index alone.
TORCH_INDEX ?= $(if $(filter cpu,$(DEVICE)),https://download.pytorch.org/whl/cpu)
RUN_DIR ?= runs/demo
# Releases of TorchRec that `make compat` tests besides the pinned one. FBGEMM and torch stay as they are: FBGEMM's
# binaries load with the torch that they were built for only.
COMPAT_TORCHREC ?= 1.6.1 1.9.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEPS := $(VENV)/.deps-$(DEVICE)
BUILT := $(VENV)/.built-$(FLOWTT_CUDA)-$(FLOWTT_CUDA_ARCHS)
LINT := $(VENV)/.lint
SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc cmake -type f)
CPP := $(filter %.h %.cpp %.cuh %.cu,$(SOURCES) $(shell find tests -type f))

export FLOWTT_CUDA FLOWTT_CUDA_ARCHS

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Variables: DEVICE=cpu|cuda PYTHON=... VENV=... FLOWTT_CUDA=AUTO|ON|OFF FLOWTT_CUDA_ARCHS=\"90;...\""

$(DEPS): requirements/torch.txt requirements/$(DEVICE).txt requirements/stack.lock
	@$(if $(PYTHON),,echo "No Python 3.10 to 3.13 found: install one, or name it with PYTHON=/path/to/python" >&2; exit 1)
	@$(if $(filter cpu cuda,$(DEVICE)),,echo "DEVICE must be cpu or cuda, not '$(DEVICE)'" >&2; exit 1)
	@echo "Setting up $(VENV) with $$($(PYTHON) --version) and the pinned $(DEVICE) stack"
	$(if $(filter cpu,$(DEVICE)),@echo "(pip will report that torchrec asks for fbgemm-gpu; on a CPU fbgemm-gpu-cpu takes its place)")
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --no-deps -r requirements/$(DEVICE).txt
	@$(PIP) install --quiet $(if $(TORCH_INDEX),--retries 1 --extra-index-url $(TORCH_INDEX)) -r requirements/torch.txt
	@touch $@

$(BUILT): $(DEPS) $(SOURCES)
	@command -v $${CXX:-c++} >/dev/null || { echo "No C++ compiler found: install g++ >= 11 (or set CXX)" >&2; exit 1; }
	@echo "Building the kernels (FLOWTT_CUDA=$(FLOWTT_CUDA), architectures $(FLOWTT_CUDA_ARCHS))"
	@PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.built-*
	@touch $@

$(LINT): requirements/lint.lock $(DEPS)
	@$(PIP) install --quiet -r requirements/lint.lock
	@touch $@

.PHONY: setup build demo test test-all compat lint format docs performance audit lock clean distclean
setup: $(DEPS) ## make the virtual environment with the pinned stack

build: $(BUILT) ## build the kernels and install the package into the virtual environment, editable

demo: $(BUILT) ## train a DLRM on MovieLens with FBGEMM tables and with TT tables, and compare them
	$(BIN)/flowtt demo --device $(DEVICE) --run-dir $(RUN_DIR)

test: $(BUILT) ## run the tests, without the slow ones
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow"

test-all: $(BUILT) ## run all tests
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# Each beside the installed release, in front of it on the path.
compat: $(BUILT) ## run the tests of the integration with other releases of TorchRec
	for release in $(COMPAT_TORCHREC); do \
	  beside="$(abspath build/compat)/$$release"; \
	  test -d "$$beside" || $(PIP) install --quiet --no-deps --target "$$beside" "torchrec==$$release"; \
	  export PYTHONPATH="$$beside" FLOWTT_ALLOW_UNLIKE_RELEASES=1; \
	  $(BIN)/python -c "from importlib.metadata import version as v; assert v('torchrec') == '$$release', v('torchrec')"; \
	  echo "TorchRec $$release"; \
	  $(BIN)/python -m pytest -q -n 2 --dist loadfile tests/distributed tests/planner tests/examples; \
	done

lint: $(LINT) ## check style, types and the order of the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(LINT) ## format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

docs: $(BUILT) requirements/docs.lock ## build the documentation into build/docs
	$(PIP) install --quiet -r requirements/docs.lock
	@rm -rf build/docs
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs
	@echo "build/docs/index.html"

performance: $(DEPS) requirements/plots.lock ## draw docs/performance/h200 from the measurements in it
	$(PIP) install --quiet -r requirements/plots.lock
	$(BIN)/python benchmarks/performance_report.py docs/performance/h200
	PYTHONPATH=. $(BIN)/python benchmarks/planner_predictions.py docs/performance/h200

audit: $(DEPS) requirements/audit.lock ## build the CUDA kernels into build/cuda and audit the library's ABI
	$(PIP) install --quiet -r requirements/audit.lock
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/cuda -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -DFLOWTT_CUDA=ON -DFLOWTT_CUDA_ARCHS="$(FLOWTT_CUDA_ARCHS)" -DFLOWTT_OUTPUT_DIR=$(abspath build/cuda/lib)
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/cuda
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python ci/audit_abi.py --cuda build/cuda/lib/libtorchrec_flowtt.so

lock: ## resolve requirements/*.in anew into requirements/*.lock
	$(PYTHON) -m venv build/uv && build/uv/bin/python -m pip install --quiet uv
	PATH="$(abspath build/uv/bin):$$PATH" bash requirements/lock.sh

clean: ## remove what was built and what tests and runs left
	rm -rf build dist runs torchrec_flowtt/lib .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	rm -f $(VENV)/.built-*
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## remove the virtual environment too
	rm -rf $(VENV)
