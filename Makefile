# Every verb makes its environment first, once: .venv, remade when pyproject.toml or constraints.txt change.
# test-rllib and test-frameworks have their own. PYTHON names the interpreter (3.10 or newer) to make
# them from, VENV, VENV_RLLIB and VENV_FRAMEWORKS where they go, JOBS the processes that check and test.
# BACKENDS names those whose code is broken on purpose, and MUTANTS=--tested says that the tests have just passed.

PYTHON ?= python3
VENV ?= .venv
VENV_RLLIB ?= .venv-rllib
VENV_FRAMEWORKS ?= .venv-frameworks
JOBS ?= 2
BACKENDS ?= reference cpu
DEMO_OUTPUT ?= build/demo
GPU_OUTPUT ?= build/gpu
CASES ?= 10000
SEED ?= 0

PY := $(VENV)/bin/python
# Of the packages' modules those are compiled that are imported, when they first are, and kept for the next process.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip --quiet --disable-pip-version-check --no-input install --no-compile
INSTALL := $(PY) $(PIP_INSTALL)
INSTALL_RLLIB := $(VENV_RLLIB)/bin/python $(PIP_INSTALL)
INSTALL_FRAMEWORKS := $(VENV_FRAMEWORKS)/bin/python $(PIP_INSTALL)
# Every >= of the dependencies as ==.
LOWEST = $(shell sed -n '/^dependencies/,/^]/s/^ *"\([a-z]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml)
TORCH := $(shell sed -n 's/^torch==/&/p' constraints.txt)
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.ready-docs
RLLIB_READY := $(VENV_RLLIB)/.ready
FRAMEWORKS_READY := $(VENV_FRAMEWORKS)/.ready
MEASURES := python -m benchmarks benchmarks/results/cpu --device cpu
MEASURE := $(VENV)/bin/$(MEASURES)
REPORT := $(PY) -m benchmarks.report
COMPILED := env -u TRITON_INTERPRET
# There are as many processes as cores, and threads of OpenMP spin while they wait.
INTERPRETED := env TRITON_INTERPRET=1 OMP_NUM_THREADS=1
QUICK_TESTS := estimators_*.py conventions.py normalization.py losses.py oracles.py backends.py docs.py
QUICK := RL_TRITON_TEST_BACKENDS=reference,cpu RL_TRITON_TEST_COMBINATIONS=few
IN_EVERY_ENVIRONMENT := $(addprefix tests/adapters/test_,example_files.py quick_benchmarks.py)
BY_FILE := -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo example example-rllib example-frameworks check test lint type test-quick test-interpreted test-aot test-rllib test-frameworks test-versions test-newest fuzz sanitize mutants mutants-rllib format docs gpu-test speed speed-frameworks bench end-to-end learning report \
	lower-bounds release-check clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## Train PPO on CartPole, stock and with ours, in turns; compare (figure in DEMO_OUTPUT)
	@$(PY) examples/ppo_sb3.py --compare --output $(DEMO_OUTPUT)

example: $(READY) ## Run an example: make example RUN="ppo_cleanrl.py --target-return 475"
	$(PY) examples/$(RUN)

example-rllib: $(RLLIB_READY) ## Run one of RLlib: make example-rllib RUN=ppo_rllib.py (downloads Ray)
	$(VENV_RLLIB)/bin/python examples/$(RUN)

example-frameworks: $(FRAMEWORKS_READY) ## Run one of RSL-RL, RL-Games or skrl: make example-frameworks RUN=ppo_rsl_rl.py
	$(VENV_FRAMEWORKS)/bin/python examples/$(RUN)

check: lint type test-quick ## What to run all day: style, types, tests without compilers for GPUs (two minutes)
	@echo "make check: lint, type and test-quick passed"

test: lint type test-interpreted test-aot ## Everything that needs no GPU and no Ray, but for mutants
	@echo "make test: lint, type, test-interpreted and test-aot passed"

lint: $(READY) ## Check style, formatting, the size of functions and the number of lines
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) scripts/check_lines.py

type: $(READY) ## Check types
	$(PY) -m mypy --num-workers $(JOBS)

test-quick: $(READY) ## Tests of the reference and cpu backends: without torch.compile, few combinations of parameters
	$(COMPILED) $(QUICK) $(PY) -m pytest $(BY_FILE) -m "not slow" -k "not compile and not two_processes" \
		$(addprefix tests/core/test_,$(QUICK_TESTS)) tests/scripts

test-interpreted: $(READY) ## Tests of the core and the adapters, Triton through its interpreter
	$(INTERPRETED) $(PY) -m pytest $(BY_FILE) tests/adapters tests/core tests/scripts

test-aot: $(READY) ## Compile the Triton kernels ahead of time; no GPU needed
	$(COMPILED) $(PY) -m pytest -n $(JOBS) tests/aot

test-rllib: $(RLLIB_READY) ## Tests of the RLlib adapter, on real Ray processes (downloads Ray)
	$(VENV_RLLIB)/bin/python -m pytest $(BY_FILE) \
		tests/adapters/rllib $(IN_EVERY_ENVIRONMENT)

test-frameworks: $(FRAMEWORKS_READY) ## Tests of the adapters for RSL-RL, RL-Games, skrl and verl (downloads them)
	$(VENV_FRAMEWORKS)/bin/python -m pytest $(BY_FILE) tests/frameworks $(IN_EVERY_ENVIRONMENT)

test-versions: $(READY) $(RLLIB_READY) $(FRAMEWORKS_READY) ## Adapters with other versions, briefly; VERSIONS=--all: all, on all tests; --newest: the newest
	$(PY) scripts/test_versions.py main=$(PY) rllib=$(VENV_RLLIB)/bin/python frameworks=$(VENV_FRAMEWORKS)/bin/python $(VERSIONS)

fuzz: $(READY) ## Compare CASES random calls of each estimator (from SEED) with the oracles, on all backends of this machine
	$(COMPILED) HYPOTHESIS_PROFILE=fuzz CASES=$(CASES) $(PY) -m pytest $(BY_FILE) --hypothesis-seed=$(SEED) \
		tests/core -k "test_random_cases or test_any_minibatch"

SANITIZED := triton and (random_cases or every_length or layouts or the_equation or heads or any_minibatch or any_shape)
SANITIZED_FILES := $(addprefix tests/core/test_,estimators_matrix.py estimators_packed.py normalization.py losses.py)
# Without PyTorch's own cache of memory, every tensor is an allocation whose ends memcheck knows.
SANITIZE := $(COMPILED) PYTORCH_NO_CUDA_MEMORY_CACHING=1 RL_TRITON_TEST_BACKENDS=triton RL_TRITON_TEST_COMBINATIONS=few compute-sanitizer

sanitize: $(addprefix sanitize-,memcheck racecheck initcheck synccheck) ## Run tests under the tools of compute-sanitizer, on an NVIDIA GPU (logs in GPU_OUTPUT)

sanitize-%: $(READY)
	@mkdir -p $(GPU_OUTPUT)
	$(SANITIZE) --tool $* --error-exitcode 99 --target-processes all $(PY) -m pytest -q -p no:cacheprovider -k "$(SANITIZED)" $(SANITIZED_FILES) > $(GPU_OUTPUT)/sanitize_$*.log 2>&1

mutants: $(addprefix mutants-,$(BACKENDS)) ## Break the code on purpose; the tests must notice every time

mutants-rllib: $(RLLIB_READY) ## Of the adapter for RLlib (downloads Ray)
	$(COMPILED) $(VENV_RLLIB)/bin/python scripts/mutants.py rllib --jobs $(JOBS) $(MUTANTS)

mutants-%: $(READY)
	$(COMPILED) $(PY) scripts/mutants.py $* --jobs $(JOBS) $(MUTANTS)

format: $(READY) ## Mend style and formatting
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(DOCS_READY) ## Build the site into site/; a warning is an error
	$(PY) -m mkdocs build --strict

gpu-test: $(READY) ## The whole suite on a real GPU, with the real compiler (results in GPU_OUTPUT)
	$(COMPILED) $(PY) scripts/gpu_tests.py $(GPU_OUTPUT)
	$(COMPILED) $(PY) scripts/mutants.py triton --jobs $$(nproc) --tested > $(GPU_OUTPUT)/mutants.txt

bench: $(READY) ## Measure every estimator on this CPU against NumPy, Numba, SB3 and a loop, and write the pages
	$(MEASURE) calls_cpu
	$(REPORT)

speed: $(READY) ## Measure losses, packed sequences, first calls and updates on this CPU, and write the pages
	$(MEASURE) perceptrons packed first_call losses
	$(REPORT)

speed-frameworks: $(READY) $(FRAMEWORKS_READY) ## Measure adapters on this CPU against RSL-RL, RL-Games and skrl, and write the pages
	$(VENV_FRAMEWORKS)/bin/$(MEASURES) robotics
	$(REPORT)

end-to-end: $(READY) $(RLLIB_READY) ## Measure training loops end to end on this CPU, and write the pages (downloads Ray)
	$(MEASURE) cleanrl sb3 torchrl
	$(VENV_RLLIB)/bin/$(MEASURES) rllib impala rllib_training
	$(REPORT)

learning: $(READY) ## Train PPO of Stable-Baselines3 and ours from five seeds each on this CPU, and write the pages
	$(MEASURE) learning --jobs $(JOBS)
	$(REPORT)

report: $(READY) ## Write the parts of the pages, and the figures, that come from benchmarks/results/
	$(REPORT)

lower-bounds: ## Test the core with the oldest supported packages, in an environment of its own (slow: downloads another torch)
	$(PYTHON) -m venv build/lower-bounds
	build/lower-bounds/bin/python $(PIP_INSTALL) --upgrade pip
	build/lower-bounds/bin/python $(PIP_INSTALL) $(LOWEST) pytest pytest-xdist hypothesis -e .
	$(INTERPRETED) build/lower-bounds/bin/python -m pytest $(BY_FILE) tests/core

test-newest: ## Test the core with the newest packages, or NEWEST="torch==2.14.*", in an environment of its own (slow)
	$(PYTHON) -m venv build/newest
	build/newest/bin/python $(PIP_INSTALL) ".[dev]" $(NEWEST:%="%")
	$(INTERPRETED) build/newest/bin/python -m pytest $(BY_FILE) tests/core
	$(COMPILED) build/newest/bin/python -m pytest -n $(JOBS) tests/aot

release-check: ## Build sdist and wheel, install each in a fresh environment and use it (slow: installs torch twice)
	$(PYTHON) scripts/check_release.py

clean: ## Remove what the verbs made, except the environments
	rm -rf build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' \
		-not -path './$(VENV_RLLIB)/*' -not -path './$(VENV_FRAMEWORKS)/*' -prune -exec rm -rf {} +

distclean: clean ## Remove the environments and downloads too
	rm -rf $(VENV) $(VENV_RLLIB) $(VENV_FRAMEWORKS) .cache

# An environment for the Python 3.N of the second argument, or newer. torch goes first and by its exact version: otherwise
# its dependents choose the build.
define make_environment
$(PYTHON) -c 'import sys; sys.version_info >= (3, $(2)) or sys.exit("Python 3.$(2) or newer is needed: make PYTHON=...")'
echo "Installing what it needs into $(1), once: that takes minutes, most of them to download PyTorch"
$(PYTHON) -m venv $(1)
$(1)/bin/python $(PIP_INSTALL) --upgrade "pip>=23.1"
$(1)/bin/python $(PIP_INSTALL) "$(TORCH)"
endef

$(READY): pyproject.toml constraints.txt
	@$(call make_environment,$(VENV),10)
	@$(INSTALL) -c constraints.txt -e ".[sb3-zoo,cleanrl,torchrl,bench,dev]"
	@touch $@

$(DOCS_READY): $(READY)
	@$(INSTALL) -c constraints.txt -e ".[docs]"
	@touch $@

$(RLLIB_READY): pyproject.toml constraints.txt
	@$(call make_environment,$(VENV_RLLIB),10)
	@$(INSTALL_RLLIB) -c constraints.txt -e ".[rllib]" hypothesis pytest pytest-xdist
	@touch $@

# The frameworks themselves without their dependencies, of which tests need few; pip then names those it misses. Of
# OpenRLHF and SkyRL, which asks for Python 3.12, tests read the source alone.
$(FRAMEWORKS_READY): pyproject.toml constraints.txt constraints-frameworks.txt
	@$(call make_environment,$(VENV_FRAMEWORKS),10)
	@$(INSTALL_FRAMEWORKS) -c constraints.txt -c constraints-frameworks.txt -e . accelerate codetiming datasets gitpython \
		gymnasium hypothesis omegaconf psutil pytest pytest-xdist ray tensorboard tensorboardx tensordict tqdm transformers
	@$(INSTALL_FRAMEWORKS) -c constraints-frameworks.txt --no-deps openrlhf rl-games rlinf rsl-rl-lib skrl trl verl
	@$(INSTALL_FRAMEWORKS) -c constraints-frameworks.txt --no-deps --ignore-requires-python skyrl
	@touch $@
