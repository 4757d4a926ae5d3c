# Every target that runs something does the set-up first; tools/setup.sh is quick when all is there.

PYTHON := .venv/bin/python
MAKEFLAGS += --no-print-directory

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full fuzz lint bench clean

help: ## say what the targets are
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## install what is missing: Debian packages (as root) and the virtual environment .venv
	@tools/setup.sh

demo: setup ## start real containers on a simulated DGX A100 and show what each of them sees
	@$(PYTHON) tools/demo.py

test: setup ## the test suite, without the long sweeps
	@$(PYTHON) -m pytest tests -m "not slow" --durations=10

test-full: setup ## the test suite with the long sweeps
	@$(PYTHON) -m pytest tests --durations=25

fuzz: setup ## atheris on every parser of foreign bytes, FUZZ_SECONDS (60) each; ARGS="loader_cache" for one
	@$(PYTHON) -c 'import atheris' 2>/dev/null || $(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	@$(PYTHON) tests/fuzz/fuzz.py $(ARGS)

lint: setup ## ruff (rules and format) and mypy --strict
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

bench: setup ## what hook and runtime cost a container start, into README.md and tests/bench/results.json; ARGS="--rounds 50"
	@$(PYTHON) -m tests.bench.bench --record $(ARGS)

clean: ## remove the virtual environment and everything that tools left behind
	@echo "removing .venv (make setup makes it again), the caches of pytest, mypy, ruff and hypothesis, and compiled Python"
	@rm -rf .venv *.egg-info build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -prune -exec rm -rf {} +
