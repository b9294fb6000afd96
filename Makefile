# `make demo` and `make test` need nothing but make and Python 3.10 (or newer): they set up .venv first if it is not there.

VENV := .venv
STAMP := $(VENV)/.setup-done
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --require-hashes --no-deps
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)

.PHONY: help setup demo test test-all test-megatron-core bench-dry fuzz torture flips upstream-tests unit lint check format docs site site-version graph lock audit dist release-dry types workflows canary clean gpu gpu-quick gpu-dry gpu-wheels
help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

setup: $(STAMP)  ## Create .venv with all dependencies

# torch goes first, so that the rest is resolved around it. One that is in .venv already (a ROCm build, say) stays.
# Where a lock of this Python exists, each file is compared with its SHA-256. A build of torch for a GPU needs libraries
# that are in no lock: pip adds them. Which build of torch is taken is for pip to choose, not for the hashes.
$(STAMP): pyproject.toml $(wildcard constraints/*.txt constraints/*.lock)
	@test -x $(VENV)/bin/python || test -n "$(PYTHON)" || \
	{ echo "No Python 3.10 or newer with venv on the PATH. Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(VENV)/bin/python || { echo "Making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@set -e; \
	set_of=constraints/cpu-py$$($(VENV)/bin/python -c 'import sys; print("%d%d" % sys.version_info[:2])'); \
	cat $$set_of.txt > $(VENV)/pins.txt 2>/dev/null || true; \
	if [ "$$(uname -sm)" = "Linux x86_64" ]; then cat $$set_of.lock; fi > $(VENV)/locked.txt 2>/dev/null || true; \
	if $(VENV)/bin/python -c 'import torch' 2>/dev/null; then \
		for file in pins locked; do \
			grep -v '^torch==' $(VENV)/$$file.txt > $(VENV)/$$file.tmp || true; mv $(VENV)/$$file.tmp $(VENV)/$$file.txt; \
		done; \
	else \
		echo "Installing torch (this takes a while)"; \
		if grep '^torch==' $(VENV)/locked.txt > $(VENV)/torch.txt; then \
			$(RUN) pip download --quiet --no-deps -d $(VENV)/torch -c $(VENV)/pins.txt torch; \
			$(LOCKED) --no-index --find-links $(VENV)/torch -r $(VENV)/torch.txt; rm -r $(VENV)/torch; \
		fi; \
		$(PIP) -c $(VENV)/pins.txt torch; \
	fi; \
	echo "Installing isthmus and its tools"; \
	if [ -s $(VENV)/locked.txt ]; then \
		$(LOCKED) -r $(VENV)/locked.txt; $(PIP) --no-deps --no-build-isolation -e .; \
	else $(PIP) -c $(VENV)/pins.txt -e '.[dev]'; fi
	@touch $@

demo: $(STAMP)  ## Train, export and evaluate a small model on this machine
	@test ! -d isthmus-demo || { echo 'Removing the isthmus-demo of last time'; rm -r isthmus-demo; }
	$(VENV)/bin/isthmus demo --out isthmus-demo

# A file at a time, since its tests share models and ranks; the slow files first, as they are collected. Four on two
# cores, since tests of failures wait for timeouts.
# Tests start many processes, which share the compiled modules even where the environment says not to write them.
PYTEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST_OPTIONS := --dist loadfile --no-loadscope-reorder -q
PYTEST := $(PYTEST_ENV) $(RUN) pytest -n 4 $(PYTEST_OPTIONS)

test: $(STAMP)  ## The tests that run on a CPU, without further layouts and models (marker thorough) and benchmarks
	$(PYTEST) -m "not benchmarks and not thorough"

test-all: $(STAMP)  ## Every test that runs on a CPU: before a release, and after a change of the engine
	$(PYTEST)

# The engine with the oldest and the newest megatron-core, and the checkpoints of all under each other. Wheels of 0.17 and
# newer are for Python 3.12: older ones install them anyway, without the compiled dataset helpers.
MEGATRON_VERSIONS := 0.16 0.17 0.18 0.19
MEGATRON_CORE := build/megatron-core
ENGINE_TESTS := tests/unit/engine tests/parity/test_logits.py $(addprefix tests/ranks/test_, $(addsuffix .py, \
	layouts pipeline mtp experts fsdp ddp_overlap context_parallel precision optimizers checkpoint converted_checkpoints lora)) \
	--ignore=tests/unit/engine/upstream/test_dataset_helpers.py

$(MEGATRON_CORE)/%/.done: $(STAMP)
	@rm -rf $(@D)
	@other=; test $* = 0.16 || $(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	other='--python-version 3.12 --only-binary=:all: --ignore-requires-python'; $(PIP) --no-deps --target $(@D) $$other 'megatron-core==$*.*'
	@touch $@

# The plugin imports isthmus.engine first: without Triton, megatron-core 0.18 and newer cannot be imported alone.
test-megatron-core: $(MEGATRON_VERSIONS:%=$(MEGATRON_CORE)/%/.done)  ## The engine with the oldest and the newest megatron-core; needs network
	@set -e; for version in $(firstword $(MEGATRON_VERSIONS)) $(lastword $(MEGATRON_VERSIONS)); do \
	echo "megatron-core $$version"; PYTHONPATH=$(CURDIR)/$(MEGATRON_CORE)/$$version \
	$(PYTEST) -p isthmus.engine -m "not thorough" $(ENGINE_TESTS); done
	ISTHMUS_MEGATRON_CORE=$(CURDIR)/$(MEGATRON_CORE) $(PYTEST) tests/megatron_versions

canary: $(STAMP)  ## Tests with the newest megatron-core, transformers, torch and peft (CASES, OUT, RECORD); needs network
	$(VENV)/bin/python benchmarks/canary.py $(CASES) $(if $(OUT),--out $(OUT)) $(if $(RECORD),--record)

bench-dry: $(STAMP)  ## Run each benchmark on tiny inputs, to check that it works: when one has changed
	$(PYTEST) tests/benchmarks

FUZZ_N ?= 50000
fuzz: $(STAMP)  ## Damaged and hostile files for every reader (FUZZ_N inputs, a minute for 50,000)
	nice $(VENV)/bin/python benchmarks/fuzz.py --n $(FUZZ_N)

KILLS ?= 1000
torture: $(STAMP)  ## Kill training, convert, prepare and merge at random instants, and compare the results (KILLS, an hour)
	nice $(VENV)/bin/python benchmarks/torture.py --n $(KILLS)

# They need einops six wrapt pytest-asyncio pytest-mock, and as many processes as Megatron-LM's CI has GPUs.
UPSTREAM_ARGS = $(if $(RANKS),--ranks $(RANKS)) $(if $(ONLY),--only $(ONLY)) $(if $(RECORD),--record)

upstream-tests: $(STAMP)  ## Megatron-LM's unit tests on this CPU (MEGATRON_LM=checkout, ONLY, RANKS, RECORD)
	@test -d "$(MEGATRON_LM)" || { echo "Name a checkout: make upstream-tests MEGATRON_LM=DIR" >&2; exit 2; }
	OMP_NUM_THREADS=1 nice -n 15 $(VENV)/bin/python benchmarks/upstream_tests.py $(MEGATRON_LM) $(UPSTREAM_ARGS)

FLIPS ?= 1000
flips: $(STAMP)  ## Damage random places of all outputs, and run the commands that read them (FLIPS, 15 minutes)
	nice $(VENV)/bin/python benchmarks/flips.py --n $(FLIPS)

# These wait for nothing: a worker a core. A sweep has a case of each kind here; marker `slow`: more than 0.1 s.
unit: $(STAMP)  ## The short unit tests that start no process: a minute on 2 cores
	$(PYTEST_ENV) $(RUN) pytest -n logical $(PYTEST_OPTIONS) tests/unit -m "not processes and not slow and not sweep and not thorough"

lint: $(STAMP)  ## Style, types, import contracts
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(VENV)/bin/lint-imports --no-cache

check: lint unit  ## lint, then unit: what to run before a commit

format: $(STAMP)  ## Let ruff write the format
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

docs: $(STAMP)  ## Generate the reference pages from the code
	$(VENV)/bin/python docs/generate.py

SITE_STAMP := $(VENV)/.docs-done
$(SITE_STAMP): $(STAMP)
	@$(VENV)/bin/python -c 'import material, mike, mkdocstrings_handlers.python' 2>/dev/null || \
	{ echo "Installing mkdocs-material, mkdocstrings and mike"; $(PIP) -c $(VENV)/pins.txt -e '.[docs]'; }
	@touch $@

site: $(SITE_STAMP)  ## Build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict
	@echo "Open build/site/index.html"

# Other versions stay on the branch; only the branch of this clone changes.
site-version: $(SITE_STAMP)  ## Commit the site to the branch gh-pages as VERSION (0.1) and as the latest one; no push
	@test -n "$(VERSION)" || { echo "Name a version: make site-version VERSION=0.1" >&2; exit 2; }
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases $(VERSION) latest
	$(VENV)/bin/mike set-default latest
	@echo "Look at it with $(VENV)/bin/mike serve; publish it with git push origin gh-pages"

# tred (Graphviz) leaves out imports that follow from others.
graph: $(STAMP)  ## Draw the imports of ARCHITECTURE.md; needs Graphviz
	$(VENV)/bin/import-linter drawgraph isthmus | tred | dot -Tsvg > docs/images/packages.svg
	$(VENV)/bin/import-linter drawgraph isthmus.engine | tred | dot -Tsvg > docs/images/engine.svg

# The tools have an environment of their own: they must not change what is tested.
TOOLS := build/tools
$(TOOLS)/.done: constraints/tools.lock $(STAMP)
	@rm -rf $(TOOLS) && $(RUN) venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r constraints/tools.lock
	@touch $@

lock: $(TOOLS)/.done  ## Write the hashes of constraints/*.txt into constraints/*.lock: after a change of versions
	PATH=$(CURDIR)/$(TOOLS)/bin:$$PATH $(VENV)/bin/python constraints/lock.py

dist: $(TOOLS)/.done  ## Build the wheel and the sdist, with the locked build tools; the same commit gives the same bytes
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(TOOLS)/bin/uv build --quiet --no-build-isolation \
	--python $(VENV)/bin/python --out-dir dist

release-dry: $(TOOLS)/.done types  ## All that a release publishes, in build/release; tags and uploads nothing (FINAL=1 before a tag)
	$(TOOLS)/bin/python .ci/release.py --python $(VENV)/bin/python $(if $(FINAL),--final)

# pyright checks what users import with Node.js, which no other target needs.
PYRIGHT := build/pyright
$(PYRIGHT)/.done: constraints/types.lock $(STAMP)
	@rm -rf $(PYRIGHT) && $(RUN) venv $(PYRIGHT)
	@$(PYRIGHT)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r constraints/types.lock
	@touch $@

types: $(PYRIGHT)/.done  ## pyright --verifytypes: all public types are known, and 95% of those of all modules
	$(PYTEST_ENV) $(RUN) pytest -n 0 -q -s tests/unit/test_package.py::test_types_are_known

ACTIONLINT := build/actionlint
$(ACTIONLINT)/.done: constraints/workflows.lock $(STAMP)
	@rm -rf $(ACTIONLINT) && $(RUN) venv $(ACTIONLINT)
	@$(ACTIONLINT)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r constraints/workflows.lock
	@touch $@

workflows: $(ACTIONLINT)/.done $(TOOLS)/.done  ## actionlint, shellcheck and zizmor over .github/workflows
	PATH=$(CURDIR)/$(ACTIONLINT)/bin:$$PATH actionlint
	$(TOOLS)/bin/zizmor --offline .github/workflows

audit: workflows  ## Known vulnerabilities of the locked versions, after workflows; needs network
	for lock in constraints/*.lock; do \
	$(TOOLS)/bin/pip-audit --strict --progress-spinner off --disable-pip --require-hashes -r $$lock || exit 1; done

# A GPU machine may have no network and its own torch: gpu-wheels fills a folder on another machine, from which gpu
# installs beside the packages of the machine what they lack. With neither, see docs/how-to/measure-a-gpu.md.
GPU_WHEELS ?= gpu-wheels
GPU_SITE := build/gpu-site
GPU_PYTHON ?= $(if $(wildcard $(GPU_WHEELS)/*.whl),python3,$(or $(wildcard $(VENV)/bin/python),python3))
GPU_PYTHONS ?= 3.11 3.12
GPU_ARGS = $(if $(PARTS),--parts $(PARTS)) $(if $(LIMIT_S),--limit-s $(LIMIT_S)) $(if $(GPU_OUT),--out $(GPU_OUT)) \
	$(if $(FRESH),--fresh) $(if $(RECORD),--record)
GPU_PARTS = $(GPU_PYTHON) benchmarks/gpu_setup.py --wheels $(GPU_WHEELS) --site $(GPU_SITE) && \
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/$(GPU_SITE) $(GPU_PYTHON) benchmarks/gpu_parts.py

gpu-wheels: $(STAMP)  ## Collect wheels for a GPU machine without network (GPU_PYTHONS, GPU_TORCH, GPU_WITH)
	$(VENV)/bin/python benchmarks/gpu_wheels.py --python-version $(GPU_PYTHONS) --out $(GPU_WHEELS) \
	$(if $(GPU_TORCH),--torch $(GPU_TORCH)) $(if $(GPU_WITH),--with $(GPU_WITH))

gpu:  ## Tests and benchmarks on a GPU, continued by the next call (PARTS, LIMIT_S, FRESH, GPU_OUT, RECORD)
	$(GPU_PARTS) $(GPU_ARGS)

gpu-quick:  ## The parts with the most answers, in at most 9 minutes; build/gpu/summary.md exists at any time
	$(GPU_PARTS) --quick $(GPU_ARGS)

gpu-dry: $(STAMP)  ## The same with tiny models on this CPU, to check that all of it runs
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src $(VENV)/bin/python benchmarks/gpu_parts.py --dry $(GPU_ARGS)

clean:  ## Remove caches and builds, keep .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
