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
# More options for pytest, for example: make test PYTEST="-k breaker -x"
PYTEST ?=

.PHONY: help venv test test-vllm test-vllm-all test-sglang lint demo bench clean

help:  ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

venv: $(READY)  ## Create .venv and install everything that the other targets need

$(READY): pyproject.toml constraints.txt scripts/bootstrap
	./scripts/bootstrap
	@touch $@

test: $(READY)  ## Run the tests, those on a real Mooncake included where it can be imported
	$(BIN)/python -m pytest $(PYTEST)

test-vllm: VLLM_TESTS := -m "not slow"
test-vllm: .venv-vllm/.ready  ## Run the tests of the vLLM connector, but the long ones, in an environment of their own
	@$(test_vllm)

test-vllm-all: .venv-vllm/.ready  ## Run all tests of the vLLM connector
	@$(test_vllm)

# A process per file: an engine leaves more behind than the next one likes. 5: nothing in a file was chosen.
define test_vllm
set -e; for file in tests/adapters/vllm/test_*.py; do \
	.venv-vllm/bin/python -m pytest -c tests/adapters/vllm/pytest.ini $(VLLM_TESTS) $$file $(PYTEST) || [ $$? -eq 5 ]; done
endef

.venv-vllm/.ready: scripts/venv-vllm
	PYTHON=$${PYTHON:-python3} ./scripts/venv-vllm
	@touch $@

test-sglang: .venv-sglang/.ready  ## Compare pools with SGLang's own assembler, in a virtual environment of its own
	.venv-sglang/bin/python -m pytest -c tests/adapters/sglang_pools/run.ini --rootdir . \
		tests/adapters/sglang_pools $(PYTEST)

.venv-sglang/.ready: scripts/venv-sglang
	PYTHON=$${PYTHON:-python3} ./scripts/venv-sglang
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
