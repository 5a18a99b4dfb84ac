# Everything a fresh clone needs: each target sets itself up. PYTHON picks the interpreter (3.11 or 3.12).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
COMPILED := $(VENV)/compiled

.PHONY: demo test test-slow attack check lint types imports docs clean help

help:
	@echo "make demo       set up and run the demo: a measured comparison in about five minutes"
	@echo "make test       set up and run the tests"
	@echo "make test-slow  run the tests that take minutes: simulations and audits"
	@echo "make attack     kill runs and mutate inputs: 10,500 tries in about two hours, can be continued"
	@echo "make check      run tests, lint, types and the import contract"
	@echo "make docs       build the documentation site: site/index.html"
	@echo "make clean      remove the virtual environment"

demo: $(READY)
	$(BIN)/joulelab demo

# Two workers, whole files each: most tests wait for a recorder or a child process, not for a core. Files run in the
# order of their names, because the slowest (cli, cluster) have few tests and would otherwise run last and alone.
test: $(COMPILED)
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Simulations and audits that take minutes.
test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 -m slow

# Prints a table of faults, tries and losses. Finished tries are kept in .attack.json, so a second call continues.
attack: $(READY)
	$(BIN)/python tests/attack/attack.py

check: test lint types imports

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

# Warnings are errors: a dead link, a missing anchor or a page that the navigation lacks fails the build.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

# Tests start hundreds of programs that import torch; with bytecode compiled in advance each starts seconds sooner, also
# where writing bytecode is disabled. Files of other Python versions in some packages fail to compile and do not matter.
$(COMPILED): $(READY)
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	@touch $@

# The stamp is newer than what defines the environment, so a second call starts at once.
$(READY): pyproject.toml constraints.txt src/joulelab/data/samples.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "joulelab needs Python 3.11 or 3.12, found $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv --upgrade-deps $(VENV) || \
	  { echo "python's venv module is missing (on Debian and Ubuntu: apt-get install python3-venv)"; rm -rf $(VENV); exit 2; }
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[train,vision,graphs,dev]"
	$(BIN)/joulelab samples fetch
	@touch $@

clean:
	rm -rf $(VENV)
