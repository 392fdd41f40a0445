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

# Of what is installed, a tenth is ever imported: instead of all of it, the first import of a module compiles that one,
# and an import of the application here nearly all that a start needs.
$(VENV)/.stamp: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this takes a few minutes."
	@$(BIN)/python -m pip install --quiet --no-compile -e '.[dev]'
	@$(BIN)/python -c "import deployment.local"
	@touch $@

demo: setup
	$(BIN)/dflash-serve demo

# tests/distribution.py says which tests stay together, and what comes first.
test: setup
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
