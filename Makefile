# Each target does its own set-up. `make help` lists them.
VENV ?= .venv
PYTHON ?=
ARGS ?=
export VENV PYTHON
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu release-test bench bench-gpu check lint format docs release wheel clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Settings: VENV=$(VENV)  PYTHON=(first of 3.12, 3.11, 3.13)  ARGS=(passed on)"

setup:  ## make or update the virtual environment
	@scripts/setup.sh

demo: setup  ## run the small RL loop on the CPU
	@"$(VENV)/bin/python" examples/rl_cpu/main.py $(ARGS)

test: setup  ## run the quick tests
	@scripts/test.sh "not slow and not gpu" $(ARGS)

test-slow: setup  ## run the slow tests
	@scripts/test.sh "slow and not gpu" $(ARGS)

test-gpu: setup  ## run the tests that need a CUDA device
	@scripts/test.sh gpu $(ARGS)

release-test: setup  ## two Serve replicas under load, 60 syncs, every promise checked (quarter of an hour)
	@"$(VENV)/bin/python" test/serve/release_run.py $(ARGS)

bench: setup  ## what a delta would cost beside a full sync, on this CPU
	@"$(VENV)/bin/python" benchmark/full_or_delta.py $(ARGS)

bench-gpu: setup  ## what a sync costs on a CUDA device, beside copies and upstream's way
	@"$(VENV)/bin/python" benchmark/gpu_sync.py $(ARGS)

check:  ## hold patches/ and the overlay against the rules (no environment needed)
	@scripts/fork check

lint: setup  ## ruff, mypy and codespell on our files
	@scripts/lint.sh

format: setup  ## let ruff sort imports and lay out our files
	@"$(VENV)/bin/python" -m ruff check -q --fix-only . && "$(VENV)/bin/python" -m ruff format .

docs: setup  ## build the documentation site into site/, strictly
	@scripts/docs.sh build

release: setup check  ## build wheel and source archive twice, compare, write dist/SHA256SUMS
	@PYTHON="$(abspath $(VENV))/bin/python" scripts/fork release

wheel: setup  ## build the wheel into dist/
	@"$(VENV)/bin/python" -m pip wheel -q --no-deps -w dist . && ls dist

clean:  ## remove what builds made; the environment and the stored upstream wheel stay
	@rm -rf build/try build/try-patches build/api build/bdist* dist site .pytest_cache .mypy_cache .ruff_cache
	@find python build_backend scripts test -name __pycache__ -prune -exec rm -rf {} +
