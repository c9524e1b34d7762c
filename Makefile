SHELL := /bin/bash
.DEFAULT_GOAL := help

ENV_DIR ?= .venv
BIN := $(abspath $(ENV_DIR))/bin
PYTEST_ARGS ?=
LAST_START ?= # seconds since 1970, after which make e2e starts no test
WORKERS ?= 2
DOCS_ADDRESS ?= 127.0.0.1:8088
# Every test that runs is recorded, for make coverage.
RAN_TESTS := $(abspath .cache/ran-tests.txt)
PYTEST = GRPO_RAN_TESTS=$(RAN_TESTS) $(BIN)/python -m pytest
QUICK = -m "not slow and not soak
SLOW = -m "slow and not soak" --durations 12
# Without arguments, pytest need not collect the other files, which takes half a minute. tests/e2e/conftest.py marks all
# quick tests beside it.
ALONE_FILES = tests/e2e $$(grep -rl "mark.alone" tests --include="test_*.py" --exclude-dir=e2e)
NONE_CHOSEN = 5
# Tests that need no extension run in a copy without extensions, at the same time as the others. Each part has WORKERS
# processes. The output of the first is printed after the second.
CORE_OUTPUT = $(dir $(RAN_TESTS))core-tests.txt
AT_ONCE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Three whole runs at a time if each can have a private network (tests/private_network.py), else one. With two, processors
# of a machine with two cores are idle for a third of the time.
RUNS_AT_ONCE ?= $(shell unshare --net true 2>/dev/null && echo 3 || echo 1)
RUNS = $(if $(filter 1,$(RUNS_AT_ONCE)),,-n $(RUNS_AT_ONCE) --dist loadfile --no-loadscope-reorder)
EXACT = $(abspath bench/results/exact_resume.jsonl)
EXACT_TESTS = tests/trainers/test_exact_resume.py tests/e2e/test_exact_ranks.py
SHELL_FILES = $$(git ls-files --cached --others --exclude-standard "*.sh" "*.slurm" .ci/run)

.PHONY: help setup smoke test e2e soak exact coverage mutants docs docs-serve maxent gpu evidence lint format keys clean lock

help:  ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
	@echo 'PYTEST_ARGS="-k name -x" is handed to pytest, WORKERS=1 runs quick tests in two processes; DEVICE, ENV_DIR, ENV_MODE, PYTHON and EXTRAS to scripts/setup.sh'

setup:  ## make the environment (nothing to do when it is complete)
	@ENV_DIR="$(ENV_DIR)" bash scripts/setup.sh

smoke:  ## set up and run the smoke recipe
	@ENV_DIR="$(ENV_DIR)" bash training.sh

test: setup  ## quick tests: most in four processes, then one by one those that measure seconds
	@mkdir -p $(dir $(RAN_TESTS)) && date '+started %s' >$(RAN_TESTS)
	@failed=; trap '[ -z "$$!" ] || kill $$!' INT; \
	$(if $(PYTEST_ARGS),,GRPO_TEST_PART=core $(BIN)/python tests/core_alone.py \
		env $(PYTEST) $(QUICK) and not alone" $(AT_ONCE) >$(CORE_OUTPUT) 2>&1 & ) \
	$(if $(PYTEST_ARGS),,GRPO_TEST_PART=above) $(PYTEST) $(QUICK) and not alone" $(AT_ONCE) $(PYTEST_ARGS) || \
		[ $$? = $(NONE_CHOSEN) ] || failed=1; \
	$(if $(PYTEST_ARGS),,wait $$! || failed=1; cat $(CORE_OUTPUT); ) \
	$(PYTEST) $(QUICK) and alone" $(or $(PYTEST_ARGS),$(ALONE_FILES)) || [ $$? = $(NONE_CHOSEN) ] || failed=1; \
	[ -z "$$failed" ]

e2e: setup  ## tests of whole runs, with a real Slurm if it is installed
	@mkdir -p $(dir $(RAN_TESTS))
	GRPO_PRIVATE_NETWORK=1 GRPO_FORK_RUNS=1 GRPO_LAST_START=$(LAST_START) $(PYTEST) $(SLOW) $(RUNS) $(PYTEST_ARGS)

soak: setup  ## stop and kill jobs on a real Slurm for half an hour; adds to bench/results/soak.jsonl
	GRPO_SOAK_RESULT=$(abspath bench/results/soak.jsonl) $(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

exact: setup  ## continue runs from every checkpoint, compare final weights; writes bench/results/exact_resume.jsonl
	@GRPO_EXACT_RESULT=$(EXACT) $(BIN)/python tests/exact_record.py new
	GRPO_EXACT_RESULT=$(EXACT) $(BIN)/python -m pytest $(EXACT_TESTS) $(PYTEST_ARGS)
	@GRPO_EXACT_RESULT=$(EXACT) $(BIN)/python tests/exact_record.py

coverage: setup  ## check that the tests of tests/*_rows.yaml and faults.yaml passed in the last make test and make e2e
	GRPO_RAN_TESTS=$(RAN_TESTS) $(BIN)/python tests/ledgers.py

mutants: setup  ## empty functions one at a time; each has to fail a test (MUTANTS="words" of some)
	$(BIN)/python tests/mutants.py $(MUTANTS)

docs: setup  ## write plain Markdown into build/docs, build the site from it; site/index.html opens from disk
	@mkdir -p build/docs
	$(BIN)/python -m mkdocs build --strict

docs-serve: setup  ## serve the documentation at DOCS_ADDRESS and build what changes
	@mkdir -p build/docs
	$(BIN)/python -m mkdocs serve --dev-addr $(DOCS_ADDRESS)

maxent: setup  ## run what docs/maxent.md rests on, two hours on two cores, and write its tables; what is recorded stays
	for part in tabular_maxent tabular_length; do $(BIN)/python evidence/$$part.py || exit; done
	for part in tuning report lengths graph; do $(BIN)/python evidence/multi_answer.py $$part || exit; done
	$(BIN)/python evidence/maxent_tables.py

gpu: setup  ## run each part of the main job on this machine's GPUs, print a table for an issue (GPU_ARGS="--cpu --only file")
	$(BIN)/python bench/gpu_main_job.py $(GPU_ARGS)

evidence: setup  ## write the tables and figures of the docs from the records; measures nothing
	$(BIN)/python bench/tables.py
	$(BIN)/python evidence/maxent_tables.py

lint: setup  ## style, types, shell scripts, the Dockerfile and the language of pages and messages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck $(SHELL_FILES)
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/python scripts/prose.py
	$(BIN)/mypy

format: setup  ## rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

keys: setup  ## write the catalogue of recipe keys, and the editors' schema, from the config classes
	$(BIN)/python scripts/make_keys.py

lock:  ## resolve requirements/*.in into the locks (needs uv)
	bash scripts/lock.sh

clean:  ## remove caches and built files; runs/ and logs/ stay
	rm -rf site build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
