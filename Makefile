# Everything a fresh machine needs: `make train` and `make test` set themselves up in .venv first.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/demo

# PYTHON if it is set, else the first Python >= 3.12 that really runs (a pyenv shim may exist for a version that is
# not selected).
IS_RECENT = -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
define make_environment
if [ -n "$(PYTHON)" ]; then set -- "$(PYTHON)"; else set -- python3.12 python3.13 python3.14 python3 python \
	"$$HOME"/.pyenv/versions/3.1[2-9]*/bin/python; fi; \
for python in "$$@"; do if "$$python" $(IS_RECENT); then \
	echo "setting up $(1) with $$python"; exec "$$python" -m venv --clear $(1); fi; done; \
echo "no Python >= 3.12: looked at $$*; set PYTHON=/path/to/python" >&2; exit 2
endef

.PHONY: help train test test-all test-oldest check format benchmark clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	@$(call make_environment,$(VENV))
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
	@$(call make_environment,.venv-oldest)
	@.venv-oldest/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]' 'jax==0.11.2'
	@touch $@

test-oldest: .venv-oldest/.installed ## tests/mpmd and two integration runs on the oldest supported JAX
	@.venv-oldest/bin/python -m pytest -m "not slow" tests/mpmd tests/integration/test_two_runs.py

benchmark: $(VENV)/.dev ## the claims of the README, as ratios
	@for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean: ## remove the environments and caches, never the runs
	rm -rf $(VENV) .venv-oldest .pytest_cache .ruff_cache
