# Everything runs in .venv, which `install` makes and keeps up to date (well below a second when nothing changed).
#   PYTHON=python3.12   the Python to build .venv from     SET=cpu|gpu   the package set (default: gpu where there is an NVIDIA GPU)
#   ARGS="..."          passed on to the run or to pytest
#   N=11 SEED=1 START=0 CHAOS_FILE=runs/chaos.jsonl   of `make chaos`: faults START to N - 1 of this seed, written to this file (docs/chaos.md)
.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all chaos lint clean

PYTHON ?= python3
SET ?= auto
ARGS ?=
N ?= 11
SEED ?= 1
START ?= 0
CHAOS_FILE ?= runs/chaos.jsonl
IN_VENV := . .venv/bin/activate &&
# An engine imports some 10,000 modules: without cached bytecode every start of every process would compile them again.
export PYTHONDONTWRITEBYTECODE :=
# Tests that need a GPU stay out of a CPU environment; install.py knows which one .venv is.
NO_GPU_TESTS = $$([ "$$($(PYTHON) install.py --set $(SET) --which)" = gpu ] || echo "and not gpu")

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

install:  ## make .venv with all packages
	@$(PYTHON) install.py --set $(SET)

quickstart: install  ## train a small model on this machine and watch its reward rise
	@$(IN_VENV) python -m async_grpo.run configs/quickstart.yaml $(ARGS)

test: install  ## run the tests, without the slow ones
	@$(IN_VENV) python -m pytest -m "not slow $(NO_GPU_TESTS)" $(ARGS)

test-all: install  ## run all tests
	@$(IN_VENV) python -m pytest -m "(slow or not slow) $(NO_GPU_TESTS)" $(ARGS)

chaos: install  ## kill, stop and starve a small run, N times; START=... goes on there
	@$(IN_VENV) python -m tests.chaos --count $(N) --seed $(SEED) --start $(START) --out $(CHAOS_FILE)

lint: install  ## check the style
	@$(IN_VENV) ruff check .

clean:  ## remove .venv, caches and build results (runs/ stays)
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
