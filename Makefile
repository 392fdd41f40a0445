# Each target sets up what it needs. VENV can point elsewhere: make test VENV=/tmp/venv
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

# More than one thread a process makes small CPU models slower, and much slower when several processes share the cores.
export OMP_NUM_THREADS ?= 1
# Without compiled byte code every start costs seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test check

help:
	@echo "make demo   - serve the embedded demo model on this machine and show what a session can do"
	@echo "make test   - all tests that need no GPU"
	@echo "make check  - format, lint, types, import rules"

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	# pip compiles what it installs, other installers may not; files that are compiled already cost nothing here.
	-$(BIN)/python -m compileall -q -j 0 $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') >/dev/null 2>&1
	touch $@

demo: setup
	$(BIN)/dflash-serve demo

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
