# Everything runs in .venv, which `install` makes and keeps up to date (well below a second when nothing changed).
#   PYTHON=python3.12   the Python to build .venv from     SET=cpu|gpu   the package set (default: gpu where there is an NVIDIA GPU)
#   ARGS="..."          passed on to the run or to pytest
#   N=11 SEED=1 START=0 CHAOS_FILE=runs/chaos.jsonl   of `make chaos`: faults START to N - 1 of this seed, written to this file (docs/explanation/fault-tolerance.md)
#   ASYNC_GRPO_REPOSITORY=https://...  of `make wheel`: address of the published source, for the links in the metadata
.DEFAULT_GOAL := help
.PHONY: help install quickstart real learning gpu-check test test-system coverage test-all test-light mutants chaos lint types docs format wheel clean

PYTHON ?= python3
SET ?= auto
ARGS ?=
STAGES ?=
N ?= 11
SEED ?= 1
START ?= 0
CHAOS_FILE ?= runs/chaos.jsonl
IN_VENV := . .venv/bin/activate &&
# An engine imports some 10,000 modules: without cached bytecode every start of every process would compile them again.
export PYTHONDONTWRITEBYTECODE :=
# Tests that need a GPU stay out of a CPU environment; install.py knows which one .venv is.
NO_GPU_TESTS = $$([ "$$($(PYTHON) install.py --set $(SET) --which)" = gpu ] || echo "and not gpu")

# A module at a time on each of two cores; those that are known to be long begin first (tests/conftest.py).
ON_BOTH_CORES = -n 2 --dist loadfile --no-loadscope-reorder
help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

install:  ## make .venv with all packages
	@$(PYTHON) install.py --set $(SET)

quickstart: install  ## train a small model on this machine and watch its reward rise
	@$(IN_VENV) python -m async_grpo.run configs/quickstart.yaml $(ARGS)

real: install  ## train a pretrained model of 135 million parameters on this machine: 10 to 16 minutes on two cores
	@$(IN_VENV) python examples/real_model/make_rows.py
	@$(IN_VENV) model=$$(python examples/real_model/get_model.py) && python -m async_grpo train examples/real_model/smollm2_sums.yaml model.path=$$model $(ARGS)

learning: install  ## train recipes and compare what they learn with recorded runs
	@$(IN_VENV) python -m benchmarks.learning $(ARGS)

test: install  ## run a real training run, a kill and a resume, and all fast tests
	@$(IN_VENV) python -m pytest $(ON_BOTH_CORES) -m "not slow and not system $(NO_GPU_TESTS)" $(ARGS)

test-system: install  ## run the tests that start systems: Ray, engines, learner ranks
	@$(IN_VENV) python -m pytest -m "system and alone and not slow $(NO_GPU_TESTS)" $(ARGS)
	@$(IN_VENV) python -m pytest $(ON_BOTH_CORES) -m "system and not alone and not slow $(NO_GPU_TESTS)" $(ARGS)

coverage:  ## run the same as `test`, and print which branches it executes
	@$(MAKE) --no-print-directory test ARGS="--cov=async_grpo --cov-branch --cov-report=term:skip-covered $(ARGS)"

test-all: coverage test-system  ## run all tests, the slow ones too, and print the branches
	@$(IN_VENV) python -m pytest -m "slow and alone $(NO_GPU_TESTS)" $(ARGS)
	@$(IN_VENV) python -m pytest $(ON_BOTH_CORES) -m "slow and not alone $(NO_GPU_TESTS)" $(ARGS)

test-light:  ## run the tests that need no torch, on another Python: PYTHON=python3.13
	@$(PYTHON) -m venv --clear .venv-light
	@$(PYTHON) install.py --light | .venv-light/bin/python -m pip install --quiet --requirement /dev/stdin "setuptools>=77"
	@.venv-light/bin/python -m compileall -q async_grpo benchmarks tests
	@.venv-light/bin/python -m tests.without_torch
	@.venv-light/bin/python -m pytest $(ON_BOTH_CORES) -p tests.without_torch -m "not slow and not system and not gpu" $(ARGS)

mutants: install  ## disconnect every setting in turn: a test of it must fail
	@$(IN_VENV) python -m tests.wiring.mutants $(ARGS)

gpu-check: install  ## run the GPU paths on this machine, stage by stage: one table, one file (docs/how-to/gpus.md); STAGES="ipc kill"
	@$(IN_VENV) python -m benchmarks.gpu_check $(STAGES) $(ARGS)

chaos: install  ## kill, stop and starve a small run, N times; START=... goes on there
	@$(IN_VENV) python -m tests.chaos --count $(N) --seed $(SEED) --start $(START) --out $(CHAOS_FILE)

lint: install  ## check style and format, and build the site of docs/ (site/index.html)
	@$(IN_VENV) ruff check . && ruff format --check . && python tests/figures.py
	@$(IN_VENV) NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

types: install  ## check the types
	@$(IN_VENV) mypy

docs: install  ## write the reference pages again: settings, command line, metrics, API
	@$(IN_VENV) python docs/generate/pages.py

format: install  ## format everything
	@$(IN_VENV) ruff check --fix --select I . && ruff format .

wheel: install  ## build dist/*.whl, which has the recipes in it
	@$(IN_VENV) uv build --quiet --out-dir dist . && ls dist/*

clean:  ## remove .venv, caches and build results (runs/ stays)
	rm -rf .venv .venv-light build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
