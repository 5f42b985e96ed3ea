# Quiesce. `make help` lists what there is to do; each target sets up what it needs and repeats only what changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
ARGS ?=
PYTEST_ARGS ?=
# One more than the cores of a small machine: an eighth of the suite waits for processes of its own.
PARALLEL ?= -n 3 --dist loadfile --no-loadscope-reorder
QUIESCE_TORCH_INDEX ?=

# The first Python on the PATH that is new enough (a version manager's shim may exist and not run).
SUITABLE = import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3 python python3.11 python3.12 python3.13 python3.14; do \
	if $$name -c '$(SUITABLE)' >/dev/null 2>&1; then command -v $$name; break; fi; done)

.PHONY: help setup serve test quick soak soak-sim soak-router load rdma-lab bench bench-peers bench-transfer bench-core bench-gpu bench-loop bench-router bench-overlap lint format lock clean bench-safety test-long
help: ## show this
	@awk -F ' ## ' '/^[a-z-]+:.* ## / { sub(/:.*/, "", $$1); printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@printf '%s\n' '' \
	  'ARGS="..."                 flags for quiesce serve:  make serve ARGS="--prefill 2 --port 9000"' \
	  'ARGS="..."                 flags for the bench:      make bench ARGS=--quick (ARGS=--help lists them)' \
	  'PYTEST_ARGS="..."          flags for pytest:         make quick PYTEST_ARGS="-k ledger"' \
	  'PYTHON=...                 the Python (3.11 or newer) that makes the environment in $(VENV)' \
	  'QUIESCE_TORCH_INDEX=URL    take PyTorch from this index; for a machine without a GPU this saves gigabytes:' \
	  '                           make serve QUIESCE_TORCH_INDEX=https://download.pytorch.org/whl/cpu' \
	  'QUIESCE_CACHE=FOLDER       where fetched models live (default ~/.cache/quiesce)'

# Stamps are written last, so that an interrupted installation is taken up again and not believed.
RUNTIME := $(VENV)/.installed
TESTING := $(VENV)/.installed-for-tests

NATIVE := setup.py $(wildcard src/quiesce/*/native/*.cpp src/quiesce/*/native/*.h)

define environment
@if [ -z '$(PYTHON)' ]; then echo 'Quiesce needs Python 3.11 or newer with venv and ensurepip, and none is on the' \
  'PATH. Install it (Debian, Ubuntu: apt install python3-venv) or name it: make PYTHON=/path/to/python3' >&2; \
  exit 1; fi
@if ! $(PIP) --version >/dev/null 2>&1; then echo 'creating $(VENV) with $(PYTHON)'; \
  '$(PYTHON)' -m venv --clear $(VENV); fi
@if [ -n '$(QUIESCE_TORCH_INDEX)' ]; then echo 'installing PyTorch from $(QUIESCE_TORCH_INDEX)'; \
  $(PIP) install "$$(grep '^torch==' constraints.txt)" --index-url '$(QUIESCE_TORCH_INDEX)'; fi
endef

$(RUNTIME): pyproject.toml constraints.txt $(NATIVE)
	$(environment)
	@echo 'installing Quiesce and its pinned dependencies into $(VENV)'
	@$(PIP) install --constraint constraints.txt --editable .
	@touch $@

# In one go, so that the native step is compiled once.
$(TESTING): pyproject.toml constraints.txt $(NATIVE)
	$(environment)
	@echo 'installing Quiesce, its pinned dependencies and what the tests need into $(VENV)'
	@$(PIP) install --constraint constraints.txt --editable '.[test]'
	@touch $(RUNTIME) $@

setup: $(TESTING) ## make the environment for development in .venv

serve: $(RUNTIME) ## serve the default model: a router, one prefill and one decode worker
	@exec $(BIN)/quiesce serve $(ARGS)

test: $(TESTING) ## check and test everything, real model and real processes included
	@$(BIN)/quiesce model pull
	@$(MAKE) -j2 lint suite

.PHONY: suite
suite: $(TESTING)
	@$(BIN)/python -m pytest $(PARALLEL) -m 'not long' --durations=25 $(PYTEST_ARGS)

test-long: $(TESTING) ## what takes minutes: every race on every engine, the soak, the largest worlds
	@$(BIN)/quiesce model pull
	@$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

quick: $(TESTING) ## test without the slow tests
	@$(BIN)/python -m pytest -m 'not slow and not long' $(PYTEST_ARGS)

SOAK_MODEL := build/soak-model
soak: $(TESTING) ## abort storms and ten rounds of the crash matrix (half an hour; ARGS="--transfer nixl/tcp --rounds 1")
	@PYTHONPATH=tests $(BIN)/python -c "from pathlib import Path; from tiny_model import make_tiny_llama; \
	  make_tiny_llama(Path('$(SOAK_MODEL)'), layers=4)"
	@$(BIN)/python -m quiesce.lab.rounds $(SOAK_MODEL) --storm 1000 $(ARGS)

soak-router: $(TESTING) ## 50,000 fake rooms, half handshakes and garbage, then 1,000 streams that leave at once
	@PYTHONPATH=tests $(BIN)/python -m e2e.floods

LOAD := build/load
LOAD_TOOL := guidellm==0.8.1
$(LOAD)/.installed:
	@$(BIN)/python -m venv --clear $(LOAD)
	@if [ -n '$(QUIESCE_TORCH_INDEX)' ]; then $(LOAD)/bin/pip install -q torch --index-url '$(QUIESCE_TORCH_INDEX)'; fi
	@echo 'installing $(LOAD_TOOL) into $(LOAD)'
	@$(LOAD)/bin/pip install -q --disable-pip-version-check '$(LOAD_TOOL)'
	@touch $@

load: $(TESTING) $(LOAD)/.installed ## drive a server with a public load tool, guidellm (its own environment, gigabytes)
	@PYTHONPATH=tests $(BIN)/python -m e2e.load $(LOAD)/bin/guidellm $(ARGS)

soak-sim: $(TESTING) ## simulate fresh seeds for as long as MINUTES says (60)
	@$(BIN)/quiesce sim --minutes $(or $(MINUTES),60) $(ARGS)

rdma-lab: $(TESTING) ## conformance over RDMA verbs, in an emulated machine with soft-RoCE (root, Debian, three hours; ARGS=nixl)
	@PYTHON=$(abspath $(BIN))/python rdma/lab $(ARGS)

bench-peers: $(TESTING) ## install vLLM's CPU build and llama.cpp beside, for the bench (4 GB, ten minutes; ARGS=vllm)
	@$(BIN)/python -m bench.install $(ARGS)

bench: $(TESTING) ## measure Quiesce beside the peers that are installed (half an hour on a quiet machine; ARGS=--quick)
	@$(BIN)/python -m bench.run $(ARGS)

bench-transfer: $(TESTING) ## measure every engine against a bare loop on it, and latency (minutes; two cores; ARGS=shm)
	@$(BIN)/python -m bench.transfer $(ARGS)

bench-core: $(TESTING) ## measure the ledger and the machines against bare lists, and against their own size (half a minute)
	@$(BIN)/python -m bench.core_speed $(ARGS)

bench-loop: $(TESTING) ## what a step costs besides the model: scheduling, batching, sampling, streaming out (a minute)
	@$(BIN)/python -m bench.loop $(ARGS)

bench-router: $(TESTING) ## what the router adds to an answer, and how many tokens it streams on one core (half a minute)
	@$(BIN)/python -m bench.router $(ARGS)

bench-gpu: $(TESTING) ## on a machine with a GPU: is it right, then how fast (8 minutes; ARGS="--dry-run --device cpu" without one)
	@$(BIN)/python -m bench.gpu $(ARGS)

bench-overlap: $(TESTING) ## what moving the pages costs the prefill loop, and a first token (five minutes)
	@$(BIN)/python -m bench.overlap $(ARGS)

bench-safety: $(TESTING) ## what holding costs: the rule on and off in turns, and how soon pages are free after a cut
	@$(BIN)/python -m bench.safety $(ARGS)

lint: $(TESTING) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TESTING) ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch pins its own CUDA packages exactly, and which there are depends on the machine: they stay out of the list.
LOCKING := build/lock
lock: $(RUNTIME) ## pin every dependency anew in constraints.txt, from pyproject.toml
	@rm -rf $(LOCKING)
	@$(BIN)/python -m venv $(LOCKING)
	@$(LOCKING)/bin/python -m pip install --disable-pip-version-check '.[test]'
	@$(LOCKING)/bin/python -m pip freeze --all --exclude pip --exclude quiesce > $(LOCKING)/all.txt
	@{ echo '# Every package that Quiesce and its tests use, pinned; written by `make lock`.'; \
	  sed -E 's/\+[A-Za-z0-9.]+$$//; / @ /d; /^(nvidia|cuda)/d' $(LOCKING)/all.txt; } > $(LOCKING)/new.txt
	@mv $(LOCKING)/new.txt constraints.txt
	@rm -rf $(LOCKING)
	@git diff --stat -- constraints.txt

clean: ## delete the environment and all caches in this folder (fetched models stay)
	rm -rf $(VENV) build dist src/*.egg-info src/quiesce/*/native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
