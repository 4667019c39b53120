# Everything a developer does. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Images often set it. Each process of the tests would then compile every module again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# compat: by a path. The other way, a folder named kvsight beside a script, such as a clone, would hide the package.
EDITABLE := --config-settings editable_mode=compat --editable

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvsight needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV)

# Stamps: installed, and pyproject.toml has not changed since.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing kvsight into $(VENV) (without torch)"
	@$(PIP) $(EDITABLE) '.[serve]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing kvsight and its tests' needs into $(VENV) (torch is large: minutes on a new machine)"
	@$(PIP) $(EDITABLE) '.[dev]'
	@# xds-protos overwrites modules of opentelemetry-proto with older ones
	@$(PIP) --force-reinstall --no-deps opentelemetry-proto==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("opentelemetry-proto"))')
	@touch $@ $(VENV)/.installed

.PHONY: demo
demo: $(VENV)/.installed ## a fleet, the index and the API in one process; EXIT=1 ends by itself
	@$(BIN)/kvsight demo $(if $(EXIT),--exit,--open)

# One process more than there are cores, because many tests wait for servers; at most five: some hold 2 GB.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores + 1 : 5)))
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: test
test: $(VENV)/.installed-dev ## the tests, with real Kafka and Redis; ARGS="-k name" narrows them
	@$(PYTEST) $(ARGS)

.PHONY: soak
soak: $(VENV)/.installed-dev ## the tests that take long: soaks, and many more random cases
	@$(PYTEST) --soak $(ARGS)

.PHONY: coverage
coverage: $(VENV)/.installed-dev ## lines that unit tests and contracts reach in their process (no kernels); HTML in build/coverage
	@$(PYTEST) tests/analysis tests/api tests/client tests/commands tests/kv_events tests/indexer --cov --cov-report=term:skip-covered --cov-report=html:build/coverage $(ARGS)

# The other folders of tests/bridge and tests/indexer try servers and links, with the same kernels.
BOUNDS = $(wildcard tests/bridge/test_*.py tests/indexer/test_*.py) tests/bridge/live/test_hostile_engines.py \
	tests/bridge/live/test_recorded_engines.py tests/analysis/test_page_history.py tests/kv_events/test_page_table.py \
	tests/kv_events/test_kernels.py tests/publisher/test_ledger.py tests/publisher/test_streams.py \
	$(addprefix tests/selection/test_,book.py policies.py) $(addprefix tests/api/selection/test_direct_,bookings.py selections.py) \
	$(addprefix tests/api/fast/test_,answer_writer.py both_ways.py fast_path.py number_kernels.py)

.PHONY: test-bounds
test-bounds: $(VENV)/.installed-dev ## the kernels' tests again, every array index checked
	@rm -rf .cache/numba-bounds  # whatever was compiled without the checks
	@NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(CURDIR)/.cache/numba-bounds $(PYTEST) $(BOUNDS) $(ARGS)

.PHONY: check
check: $(VENV)/.installed-dev ## format, lint and types; changes nothing
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary

.PHONY: format
format: $(VENV)/.installed-dev ## format, and repair what the linter can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

.PHONY: fuzz
fuzz: $(VENV)/.installed-dev ## hostile bytes for every decoder; MINUTES=10 (the tests do it for seconds)
	@$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10)

.PHONY: chaos
chaos: $(VENV)/.installed-dev ## faults under load, views compared with the engines' caches; MINUTES=10 SEED=1
	@$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: engines
engines: $(VENV)/.installed-dev ## scores against real vLLM servers on this CPU; ENVIRONMENT=folder ARGS="windows --record"
	@$(BIN)/python -m tests.engines $(if $(ENVIRONMENT),--environment $(ENVIRONMENT)) $(ARGS)

.PHONY: docs
docs: $(VENV)/.installed-dev ## the documentation site, in build/site; fails on a broken link
	@output=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1) || { echo "$$output" >&2; exit 1; }

.PHONY: audit
audit: $(VENV)/.installed-dev ## known vulnerabilities of what is installed; passes where the list cannot be reached
	@PYTHON=$(PYTHON) .ci/audit

.PHONY: manifests
manifests: $(VENV)/.installed-dev ## deploy/kubernetes/kvsight.yaml, from the Helm chart
	@$(BIN)/python -m tests.support.helm_chart

.PHONY: bench
bench: $(VENV)/.installed-dev ## the figures of benchmarks/README.md, side by side
	@$(BIN)/python -m benchmarks
	@$(BIN)/python -m benchmarks.peers

.PHONY: clean
clean: ## remove the environment and everything that was built
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
