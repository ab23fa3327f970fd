# Two commands matter: `make test` and `make demo`. Both install what is missing first.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
READY := .venv/.ready

# make demo TRACE=path/to/trace.jsonl REQUESTS=2000 STORE=mooncake://host:port
TRACE ?=
REQUESTS ?= 600
SHAPE ?= mini
STORE ?=
SECONDS ?= 1800
# More options for pytest, for example: make test PYTEST="-k breaker -x"
PYTEST ?=

.PHONY: help venv test test-all soak test-vllm test-vllm-all test-sglang test-sglang-all lint demo bench clean

help:  ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

venv: $(READY)  ## Create .venv and install everything that the other targets need

$(READY): pyproject.toml constraints.txt scripts/bootstrap
	./scripts/bootstrap
	@touch $@

test: $(READY)  ## Run the tests, but the long ones; those on a real Mooncake where it can be imported
	$(BIN)/python -m pytest -m "not long" $(PYTEST)

test-all: $(READY)  ## Run all tests
	$(BIN)/python -m pytest $(PYTEST)

# make soak SECONDS=600 TRACE=path/to/trace.jsonl
soak: $(READY)  ## Replay for half an hour on a cluster whose processes fail every few seconds
	$(BIN)/python -m tests.faults.soak --seconds $(SECONDS) $(if $(TRACE),--trace $(TRACE))

test-vllm: VLLM_TESTS := -m "not slow"
test-vllm: VLLM_FILES := $(shell grep -LE '^pytestmark = .*mark\.slow' tests/adapters/vllm/test_*.py)
test-vllm: .venv-vllm/.ready  ## Run the tests of the vLLM connector, but the long ones, in an environment of their own
	@$(test_vllm)

test-vllm-all: VLLM_FILES := $(wildcard tests/adapters/vllm/test_*.py)
test-vllm-all: .venv-vllm/.ready  ## Run all tests of the vLLM connector
	@$(test_vllm)

# A process per file: an engine leaves more behind than the next one likes. 5: PYTEST chooses nothing in a file.
define test_vllm
set -e; for file in $(VLLM_FILES); do \
	.venv-vllm/bin/python -m pytest -c tests/adapters/vllm/pytest.ini $(VLLM_TESTS) $$file $(PYTEST) || [ "$$?$(if $(PYTEST),chosen)" = 5chosen ]; done
endef

# After .venv, whose bootstrap chooses the interpreter and installs the system libraries that Mooncake links.
.venv-vllm/.ready: scripts/venv-vllm | $(READY)
	./scripts/venv-vllm
	@touch $@

SGLANG_ALL := $(wildcard tests/adapters/sglang_pools/test_*.py tests/adapters/sglang/test_*.py)

test-sglang: SGLANG_TESTS := -m "not slow"
test-sglang: SGLANG_FILES := $(shell grep -LE '^pytestmark = .*mark\.slow' $(SGLANG_ALL))
test-sglang: .venv-sglang/.ready  ## Run the tests of the SGLang linker, but the long ones, in an environment of its own
	@$(test_sglang)

test-sglang-all: SGLANG_FILES := $(SGLANG_ALL)
test-sglang-all: .venv-sglang/.ready  ## Run all tests of the SGLang linker
	@$(test_sglang)

# A process per file, as for vLLM.
define test_sglang
set -e; for file in $(SGLANG_FILES); do \
	.venv-sglang/bin/python -m pytest -c tests/adapters/sglang/run.ini --rootdir . $(SGLANG_TESTS) $$file $(PYTEST) || [ "$$?$(if $(PYTEST),chosen)" = 5chosen ]; done
endef

# pyproject.toml names the plugin, which SGLang finds where the package was installed with it.
.venv-sglang/.ready: scripts/venv-sglang pyproject.toml | $(READY)
	./scripts/venv-sglang
	@touch $@

lint: $(READY)  ## Check style, formatting, types and the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

demo: $(READY)  ## Replay a trace on an embedded store and report what each load cost
	@BIN=$(BIN) ./scripts/demo --requests $(REQUESTS) --shape $(SHAPE) $(if $(STORE),--store "$(STORE)") $(TRACE)

# make bench BENCH="--case 'mla 32x64x73728' --store local --rounds 9"
BENCH ?= --quick

bench: .venv-sglang/.ready  ## Load the same pages as SGLang's linker and bare calls do, side by side
	.venv-sglang/bin/python benchmarks/side_by_side.py $(BENCH)

clean:  ## Remove .venv and everything that was generated
	rm -rf .venv .venv-vllm .venv-sglang .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist demo-report.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
