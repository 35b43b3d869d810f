# Everything a fresh machine needs: `make train` and `make test` set themselves up in .venv first.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/demo

# The first Python >= 3.12 that really runs (a pyenv shim may exist for a version that is not selected).
FIND_PYTHON = for p in $(PYTHON) python3.12 python3.13 python3.14 python3 python \
	$$(ls -d $$HOME/.pyenv/versions/3.1[2-9]*/bin/python 2>/dev/null); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo "$$p" && break; done

.PHONY: help train test test-all test-oldest check format benchmark clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then echo "no Python >= 3.12 found on PATH or under ~/.pyenv/versions; set PYTHON=/path/to/python" >&2; exit 2; fi; \
	echo "setting up $(VENV) with $$python"; "$$python" -m venv --clear $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

train: $(VENV)/.installed ## train the demo: four pipeline stages on this machine's CPU; run it again to resume
	@$(BIN)/jax-titan train llama3-debug --run.dir $(RUN)

test: $(VENV)/.dev check ## the whole suite, without the proofs that take minutes each
	@$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/.dev check ## the whole suite with every proof
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.dev ## formatting, lint and types
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/basedpyright --level error

format: $(VENV)/.dev ## apply formatting and the safe fixes
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

# The oldest supported JAX, in its own environment: the partitioner and two real runs.
.venv-oldest/.installed: pyproject.toml
	@python=$$($(FIND_PYTHON)); "$$python" -m venv --clear .venv-oldest
	@.venv-oldest/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]' 'jax==0.11.2'
	@touch $@

test-oldest: .venv-oldest/.installed ## tests/mpmd and two integration runs on the oldest supported JAX
	@.venv-oldest/bin/python -m pytest -m "not slow" tests/mpmd tests/integration/test_two_runs.py

benchmark: $(VENV)/.dev ## the claims of the README, as ratios
	@for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean: ## remove the environments and caches, never the runs
	rm -rf $(VENV) .venv-oldest .pytest_cache .ruff_cache
