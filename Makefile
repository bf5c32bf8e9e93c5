# Needs only python3 (3.11 or newer) and make; every target does its own set-up.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak lint aot aot-all bench peers

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/'

setup: $(VENV)/.installed  ## create .venv from requirements.lock

# A working .venv is kept; a missing or half-made one is made anew.
$(VENV)/.installed: requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "k3jax needs Python 3.11 or newer; $(PYTHON) was not found (set PYTHON=...)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "k3jax needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1) (set PYTHON=...)"; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing requirements.lock (about 1 GB)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps -e .
	@touch $@

# The TPU compiler, for `make aot` only.
$(VENV)/.installed-aot: $(VENV)/.installed
	@$(PY) -m pip install -qq --disable-pip-version-check -c requirements.lock -e '.[aot]'
	@touch $@

# Large XLA temporaries are returned to the system and faulted in again at every step unless glibc is told to keep them.
KEEP_MEMORY := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=30000000000 GLIBC_TUNABLES=glibc.malloc.hugetlb=1
# LLVM's first optimisation level compiles this program in two thirds of the time, to code that is no slower.
FAST_COMPILE := XLA_FLAGS=--xla_backend_optimization_level=1

# Interrupted or run again, it continues: the training run at its last checkpoint, the prompts at the first without an answer.
demo: setup  ## train a tiny K3 on this Python's standard library, then complete prompts with it
	$(KEEP_MEMORY) $(FAST_COMPILE) JAX_PLATFORMS=cpu $(PY) train.py --config configs/train/tiny_cpu.yaml run_dir=runs/demo
	$(FAST_COMPILE) JAX_PLATFORMS=cpu $(PY) serve.py --config configs/serve/tiny_cpu.yaml --checkpoint runs/demo \
		--input examples/prompts.jsonl --output runs/demo/completions.jsonl --show

test: setup  ## the CPU test suite
	$(PY) -m pytest

soak: setup  ## fuzzing, random kills and long runs, for hours
	$(PY) -m pytest -n 0 -m 'soak and not aot' --timeout 3600

lint: setup  ## formatting, style, import rules, types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(VENV)/bin/lint-imports
	$(PY) -m mypy

# Two at a time, as a compile leaves a second core half idle; what each took is printed at the end.
AOT := XLA_FLAGS= $(PY) -m pytest -n 2 -m "aot and not soak" -rPfs

aot: $(VENV)/.installed-aot  ## compile for TPU topologies, without a TPU
	$(AOT)

aot-all: $(VENV)/.installed-aot  ## the same, and every program of docs/pods.json that its sources have left behind
	$(AOT)
	XLA_FLAGS= $(PY) -m benchmarks.pods

bench: $(VENV)/.installed-aot  ## static cycles of the TPU kernels, from the compiler's schedule, into docs/performance.md
	$(PY) -m benchmarks.static_cycles all --json build/static_cycles.json
	$(PY) -m benchmarks.report build/static_cycles.json

# Other projects' kernels need a newer Python and a newer jax than the lock above has for 3.11.
PEERS := .venv-peers
PEERS_PYTHON ?= python3.12

peers: $(PEERS)/.installed  ## .venv-peers (Python 3.12) with other projects' kernels, for side-by-side figures

$(PEERS)/.installed: requirements-peers.lock
	@$(PEERS_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
		{ echo "make peers needs Python 3.12 or newer; $(PEERS_PYTHON) is not that (set PEERS_PYTHON=...)"; exit 1; }
	@echo "installing requirements-peers.lock in $(PEERS) (about 1 GB)"
	@$(PEERS_PYTHON) -m venv --clear $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-peers.lock
	@touch $@
