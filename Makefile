# Everything runs in .venv, which .ci/environment.py makes and keeps up to date.
# PYTHON: the interpreter .venv is made from (3.11 or later). ARGS: further options of `fastmp train`, or of a wheel.
# PYTEST: further options of pytest.

CANDIDATES := python3 python3.12 python3.11 python3.13
AT_LEAST_311 := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach p,$(CANDIDATES),$(shell $(p) -c '$(AT_LEAST_311)' 2>/dev/null && echo $(p))) python3)
VENV := .venv/bin/python
SETUP := $(PYTHON) .ci/environment.py
KEEP_GOING := --continue-on-collection-errors
# One process for each core, eight at most.
WORKERS := -n $(shell nproc | awk '{print $$1 < 8 ? $$1 : 8}') --dist worksteal
# Containers often say that bytecode is not to be written. .venv has none of torch before its first import, and several
# hundred processes would each compile it, fastmp and the tests again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-ci test-full test-oldest test-newest sanitize lint docs build wheel clean

# Two GPUs or more: 2 ranks with NCCL. One GPU: 1 rank. None: 2 ranks with gloo that share the cores. The ranks
# share attention (tensor parallelism) and have half of the experts each. RANKS and ARGS say otherwise.
train:
	@$(SETUP) train
	@gpus=$$($(VENV) -c 'import torch; print(torch.cuda.device_count())'); \
	ranks=2; [ "$$gpus" = 1 ] && ranks=1; ranks=$${RANKS:-$$ranks}; \
	set -x; \
	$(VENV) -m fastmp launch -n $$ranks train --recipe configs/moe-small.toml --tp $$ranks --ep $$ranks $(ARGS)

# Two runs, one in which Triton interprets its kernels and one in which it compiles them; before them, where there is a
# GPU, its tests, for a process that has used it cannot fork ranks: their kernels are compiled on all cores first, then
# several workers run at once, then one runs the tests that need the GPU alone. A worker that hangs or dies fails one
# test. Status 5 is that PYTEST selected nothing in one.
# $(1): extras of pyproject.toml, $(2): options of pytest.
define run_tests
	@$(SETUP) $(1)
	@status=0; pytest="$(VENV) -m pytest $(KEEP_GOING) $(2)"; \
	gpus=$$($(VENV) -c 'import torch; print(torch.cuda.device_count())'); \
	if [ "$$gpus" != 0 ]; then \
	    $(VENV) -m benchmarks.precompile --phase correctness || status=1; \
	    $$pytest -m "gpu and not alone" $(WORKERS) $(PYTEST) || [ $$? = 5 ] || status=1; \
	    $$pytest -m "gpu and alone" -n 1 $(PYTEST) || [ $$? = 5 ] || status=1; \
	fi; \
	export CUDA_VISIBLE_DEVICES=; \
	TRITON_INTERPRET=1 $$pytest -m interpret $(WORKERS) $(PYTEST) || [ $$? = 5 ] || status=1; \
	[ "$$gpus" = 0 ] || some="not gpu"; \
	$$pytest -m "$$some" $(WORKERS) $(PYTEST) || status=1; \
	exit $$status
endef

test:
	$(call run_tests,test,)

# What continuous integration runs after `make test`: the full set, then ops and layers again, as torch and our own kernels
# compute on older processors, where last bits differ, and ops on the oldest.
COMPUTE := tests/ops tests/nn $(addprefix tests/tensor_parallel/test_,layers.py linear_loss.py loss.py)
test-ci:
	@$(SETUP) test
	@status=0; export CUDA_VISIBLE_DEVICES=; pytest="$(VENV) -m pytest $(KEEP_GOING) $(WORKERS)"; \
	TRITON_INTERPRET=1 $$pytest --full -m "interpret and full" $(PYTEST) || [ $$? = 5 ] || status=1; \
	$$pytest --full -m full $(PYTEST) || status=1; \
	ATEN_CPU_CAPABILITY=avx2 $$pytest $(COMPUTE) $(PYTEST) || status=1; \
	ATEN_CPU_CAPABILITY=default $$pytest tests/ops $(PYTEST) || status=1; \
	exit $$status

# All there is, with those against transformers and under other launchers; Lightning's where it is installed.
test-full:
	@rm -f tests/results/full.json
	$(call run_tests,test hf trl launchers docs,--exhaustive --record tests/results/full.json)

# All that needs no GPU, in an environment with the oldest torch that is supported, which is one with CUDA, and
# Python 3.12 if it is there (PYTHON_OLDEST); CUDA C++ is compiled where nvcc is. 7 GB.
PYTHON_OLDEST ?= $(if $(shell python3.12 -c 'print(1)' 2>/dev/null),python3.12,$(PYTHON))
test-oldest: VENV := .venv-oldest/bin/python
test-oldest: SETUP = $(PYTHON_OLDEST) .ci/environment.py --venv .venv-oldest --torch 2.10.0
test-oldest:
	$(call run_tests,test,--full)

# The quick set, and cubins for all GPUs, in an environment with the newest torch, Triton and NumPy that pip finds. 6 GB where
# that torch is one with CUDA; CUDA C++ is left out.
test-newest: VENV := .venv-newest/bin/python
test-newest: export FASTMP_CUDA := 0
test-newest: SETUP = $(PYTHON) .ci/environment.py --venv .venv-newest --torch newest
test-newest:
	$(call run_tests,test,)
	CUDA_VISIBLE_DEVICES= $(VENV) -m pytest tests/tools/test_cubins.py --full -m full $(WORKERS) $(PYTEST)

# The C++ kernels of every instruction set, those of CUDA on a CPU, replays of graphs and the host module, under the
# address and undefined-behaviour sanitizers; exchanges between threads, under the thread sanitizer.
sanitize:
	@$(SETUP) test
	CUDA_VISIBLE_DEVICES= $(VENV) -m pytest --exhaustive tests/test_sanitize.py $(PYTEST)

lint:
	@$(SETUP) dev
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	.venv/bin/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
	$(VENV) -m mypy

# The site in build/site, in an environment of its own, which has neither torch nor fastmp. A broken link is an error.
DOCS_NEEDS := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]
docs:
	@[ -x .venv-docs/bin/python ] || $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check \
	    $$($(PYTHON) -c '$(DOCS_NEEDS); print(*project["optional-dependencies"]["docs"])')
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# After a change in csrc/: compiles what changed and installs fastmp editable.
build:
	@$(SETUP) test
	@cat fastmp/_build.json

# A wheel in dist/ that installs without a compiler, for the Python of .venv and torch 2.10 to 2.15, which pip downloads
# once (4 GB). ARGS=--cuda: with CUDA C++.
wheel:
	@$(SETUP) train
	$(VENV) scripts/build_wheels.py $(ARGS)

# Leaves .venv and runs/ alone.
clean:
	rm -rf build dist *.egg-info fastmp/*.so fastmp/_build.json
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks
	find fastmp tests -name __pycache__ -type d -prune -exec rm -rf {} +
