# Every target sets up what it needs by itself; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

ARGS ?=
PYTEST_ARGS ?=
SUITE ?= foundation
SEEDS ?= 200
BASE ?=
MINUTES ?= 60
CHECK_BUDGET_S ?= 120
TEST_PROCESSES ?= 2
TEST_BUDGET_S ?= 1000
TEST_LONG_BUDGET_S ?= 2700

.PHONY: help run test test-long check audit bench bench-pairs soak sim table format clean setup-base setup-dev

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

run: setup-base ## start a broker on ./data; ARGS="..." is passed on to `tailrace serve`
	@exec .venv/bin/tailrace serve --data ./data $(ARGS)

test: setup-dev ## all tests but the long ones, within TEST_BUDGET_S; PYTEST_ARGS="..." is passed on
	@scripts/within.sh $(TEST_BUDGET_S) test scripts/tests.sh $(TEST_PROCESSES) $(PYTEST_ARGS)

test-long: setup-dev ## all tests, the long ones too, within TEST_LONG_BUDGET_S
	@scripts/within.sh $(TEST_LONG_BUDGET_S) test-long scripts/tests.sh $(TEST_PROCESSES) --long $(PYTEST_ARGS)

check: setup-dev ## style, types, direction of imports, sizes and documents
	@scripts/within.sh $(CHECK_BUDGET_S) check scripts/check.sh

audit: setup-dev ## known vulnerabilities of what is pinned; needs the network, and fails where nothing can be asked
	@exec .venv/bin/pip-audit --strict --disable-pip --no-deps -r requirements/base.lock

bench: setup-dev ## measure; SUITE=foundation, delivery, spark or security
	@exec .venv/bin/python -m bench $(SUITE)

bench-pairs: setup-dev ## compare with the commit BASE=... in five interleaved pairs of each case; ARGS="--suite delivery"
	@exec .venv/bin/python -m bench.pairs $(BASE) $(ARGS)

soak: setup-dev ## 10,000 msg/s with delays and retries for MINUTES=60: the broker's memory over time, and its slope
	@exec .venv/bin/python -m bench.soak --minutes $(MINUTES)

sim: setup-base ## run the seeded simulator; SEEDS=200
	@exec .venv/bin/python -m tailrace.sim --seeds $(SEEDS)

table: setup-dev ## rewrite the table of docs/modules.md from the docstrings
	@.venv/bin/python scripts/modules_table.py --write

format: setup-dev ## let ruff format and fix what it can
	@.venv/bin/ruff check --fix -q . ; .venv/bin/ruff format .

clean: ## remove the environment and caches; ./data is yours and stays
	rm -rf .venv .setup.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build bench/.scratch bench/.scratch-base
	find src tests bench scripts \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} + 2>/dev/null || true

setup-base:
	@scripts/setup.sh base

setup-dev:
	@scripts/setup.sh dev
