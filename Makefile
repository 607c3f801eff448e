# Two commands do everything: `make demo` and `make test`. Each sets up what it needs.
PYTHON ?= python3
EXTRAS ?=
VENV := .venv
BIN := $(VENV)/bin
comma := ,
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(or $(EXTRAS),base))

# Cache bytecode at install: without it every worker spends seconds on importing torch.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test check audit bench soak quickstart-model clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python -m uv pip install --python $(BIN)/python $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)") \
		--override constraints.txt --compile-bytecode --editable '.[dev$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	touch $@

demo: setup
	$(BIN)/rlctl train ppo

# Three test processes on two cores: starting a Ray cluster is mostly waiting.
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 3 --dist loadfile --no-loadscope-reorder

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

audit: setup
	$(BIN)/python -m tests.audit

bench: setup
	$(BIN)/python -m benchmarks.cli_help
	$(BIN)/python -m benchmarks.first_line
	$(BIN)/python -m benchmarks.compose
	$(BIN)/python -m benchmarks.rollout
	$(BIN)/python -m benchmarks.weight_sync
	$(BIN)/python -m benchmarks.pool_mode
	$(BIN)/python -m benchmarks.vllm_start
	$(BIN)/python -m benchmarks.runs 10000
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.data
	$(BIN)/python -m benchmarks.agents
	$(BIN)/python -m benchmarks.judge
	$(BIN)/python -m benchmarks.async_training

soak: setup
	$(BIN)/python -m tests.e2e.soak

quickstart-model: setup
	$(BIN)/python -m rlctl.quickstart.make_model
	$(BIN)/python -m rlctl.quickstart.make_agent_model

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
