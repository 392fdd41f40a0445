# Each target sets up what it needs. VENV can point elsewhere: make test VENV=/tmp/venv
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

TEST_PROCESSES ?= 2

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

# pip compiles what it installs, other installers may not; what is compiled already costs a second here. Some packages
# carry templates that are no valid Python, so that the status of compileall says nothing.
$(VENV)/.stamp: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this takes a few minutes."
	@$(BIN)/python -m pip install --quiet -e '.[dev]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

demo: setup
	$(BIN)/dflash-serve demo

# tests/distribution.py says which tests stay together, and what comes first.
test: setup
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
