# Every target sets itself up: the first one to run builds the environment (see scripts/env.sh), later ones find it.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Path of the environment's Python. Expanded inside a recipe, so `make help` and `make clean` build nothing.
PY = py=$$(scripts/env.sh --quiet)

.PHONY: help env demo test lint format bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  Arguments go into ARGS:   make test ARGS='tests/core -k plan'    make demo ARGS='--json out.json'"
	@echo "  The environment is built outside the tree; LEYLINE_VENV=DIR puts it elsewhere (see scripts/env.sh)."

env: ## Build or find the environment; its Python's path is the last line
	@scripts/env.sh

demo: ## An agent that edits its history, in three arms, on the real stack
	@$(PY); exec $$py -P -m leyline_lmcache demo $(ARGS)

test: ## All tests; the real servers start once per run
	@$(PY); exec $$py -P -m pytest $(ARGS)

lint: ## ruff check, ruff format --check, mypy --strict
	@$(PY); rc=0; \
	$$py -m ruff check . || rc=1; \
	$$py -m ruff format --check . || rc=1; \
	$$py scripts/typecheck.py || rc=1; \
	exit $$rc

format: ## Format and sort imports in place
	@$(PY); $$py -m ruff check --quiet --fix --exit-zero . ; $$py -m ruff format .

bench: ## Every benchmark; results go to benchmarks/results/
	@$(PY); exec $$py benchmarks/run_all.py $(ARGS)

clean: ## Remove caches and build products from the tree (not the environment)
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
