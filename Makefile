# Every verb makes .venv first if needed, so each works alone on a fresh machine. `make` lists them.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup check test test-gpu bench serve FORCE

ARGS ?=
PYTEST_ARGS ?=
PYTHON ?=
TORCH ?= auto
export PYTHON TORCH

PY := .venv/bin/python
STAMP := .venv/.setup-done

help:
	@echo 'make setup      make .venv with all that is needed (PYTHON=python3.12, TORCH=auto|cpu|gpu)'
	@echo 'make serve      serve a model at http://127.0.0.1:8000 (ARGS="MODEL --flags", ARGS=--help lists them)'
	@echo 'make check      ruff format, ruff lint, mypy, layer test: under a minute'
	@echo 'make test       all tests that need only a CPU (PYTEST_ARGS="tests/engine -k name", PYTEST_ARGS="-m slow")'
	@echo 'make test-gpu   tests that need NVIDIA GPUs'
	@echo 'make bench      all benchmarks one after the other, as ratios (BENCH="name name" picks some)'

# The stamp holds the folder it was made in: a copied or moved tree is installed anew.
ifneq "$(shell cat $(STAMP) 2>/dev/null)" "$(CURDIR)"
$(STAMP): FORCE
endif
$(STAMP): pyproject.toml setup.py .ci/setup
	@bash .ci/setup
	@printf '%s\n' "$$PWD" >$(STAMP)

setup: $(STAMP)

check: $(STAMP)
	@$(PY) -m ruff format --no-cache --check --quiet . || { echo 'make check: formatting differs; to fix: $(PY) -m ruff format .'; exit 1; }
	@$(PY) -m ruff check --no-cache --quiet .
	@$(PY) -m mypy --cache-dir "$$(test -w . && echo .mypy_cache || echo /dev/null)"
	@$(PY) -m pytest --quiet --durations=0 tests/test_layers.py

test: $(STAMP)
	@$(PY) -m pytest $(PYTEST_ARGS)

test-gpu: $(STAMP)
	@$(PY) -c 'import torch; v = torch.__version__; raise SystemExit(0 if torch.cuda.is_available() else \
	f"make test-gpu: torch {v} sees no NVIDIA GPU here; on a machine with one, make a fresh .venv: rm -r .venv && make setup")'
	@$(PY) -m pytest -m 'gpu or multi_gpu' $(PYTEST_ARGS)

# Those with a main(); the others are what they share.
BENCH ?= $(patsubst benchmarks/%.py,%,$(sort $(shell grep -lE '^(async )?def main\b' benchmarks/*.py)))

bench: $(STAMP)
	@status=0; for name in $(BENCH); do \
	    echo "== $$name"; $(PY) -m benchmarks.$$name || { status=1; echo "bench: $$name failed"; }; \
	done; exit $$status

serve: $(STAMP)
	@exec .venv/bin/pagedray serve $(ARGS)
