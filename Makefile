# Everything a fresh clone needs: each target sets itself up. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DEMO_READY := $(VENV)/demo-ready
BASE_READY := $(VENV)/base-ready
COMPILED := $(VENV)/compiled

.PHONY: demo test test-base test-slow attack mutate audit check lint types imports docs dist release clean help

help:
	@echo "make demo       set up and run the demo: a measured comparison in about five minutes"
	@echo "make test       set up and run the tests"
	@echo "make test-base  run the tests that need no torch, for example with VENV=.venv-3.14 PYTHON=python3.14"
	@echo "make test-slow  run the tests that take minutes: simulations, audits, a real Slurm"
	@echo "make attack     kill runs, mutate inputs, try bad environments: hours, can be continued"
	@echo "make mutate     change core modules one operator at a time and list what their tests do not notice"
	@echo "make audit      look up known vulnerabilities of the installed packages; needs PyPI"
	@echo "make check      run tests, lint, types and the import contract"
	@echo "make docs       build the documentation site: site/index.html"
	@echo "make dist       build and check wheel and sdist: dist/"
	@echo "make release    the same, and upload them with UPLOAD=yes"
	@echo "make clean      remove the virtual environment"

demo: $(DEMO_READY)
	$(BIN)/joulelab demo

# Three workers on two cores, whole files each: most tests wait for a recorder or a child process, not for a core (10.5
# instead of 12.5 minutes). Files run in the order of their names, because the slowest (cli, cluster) have few tests and
# would otherwise run last and alone. Slow tests compute more, so they have two.
# Some tests observe real time (cadences, limits, kills) and can fail once when other programs take the cores. What failed
# is printed and run again, alone; a second failure fails the target.
PYTEST := $(BIN)/python -m pytest
WORKERS := 3
run_tests = $(PYTEST) -n $(WORKERS) --dist loadfile $(1) || \
	  { test $$? = 1 && echo "once more, one at a time:" && $(PYTEST) --last-failed --last-failed-no-failures none $(1); }

test: $(COMPILED)
	@$(BIN)/python -m compileall -q src
	$(call run_tests,--no-loadscope-reorder)

# On Python versions without a torch at hand. What turns out to need torch is skipped with that reason.
test-base: $(BASE_READY)
	$(call run_tests,tests/stats tests/meter tests/runs tests/report tests/cli)

# Tests that take minutes: simulations, audits, a real Slurm, the journeys of the documentation.
test-slow: WORKERS := 2
test-slow: $(READY)
	$(call run_tests,-m slow)

# Prints a table of faults, tries and losses. Finished tries are kept in .attack.json, so a second call continues.
attack: $(READY)
	$(BIN)/python tests/attack/attack.py

# 25 mutants of each core module, a few minutes each. Finished ones are kept in .mutate.json.
mutate: $(READY)
	$(BIN)/python tests/mutation/mutate.py

# In a separate environment, because the audited one must not change. A package that cannot be looked up is an error.
audit: $(READY)
	@$(PYTHON) -m venv $(VENV)-audit && $(VENV)-audit/bin/pip install --quiet pip-audit
	$(VENV)-audit/bin/pip-audit --strict --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

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

# A stamp is newer than what defines the environment, so a second call starts at once. The demo needs no tools of
# developers; what `make test` installs includes what it needs.
INPUTS := pyproject.toml constraints.txt scripts/set_up.py

$(READY): $(INPUTS) src/joulelab/data/sources.py | $(BIN)/python
	$(BIN)/python scripts/set_up.py train vision graphs dev
	$(BIN)/joulelab samples fetch
	@touch $(DEMO_READY) $(BASE_READY) $@

$(DEMO_READY): $(INPUTS) src/joulelab/data/sources.py | $(BIN)/python
	$(BIN)/python scripts/set_up.py train report
	$(BIN)/joulelab samples fetch
	@touch $@

$(BASE_READY): $(INPUTS) | $(BIN)/python
	$(BIN)/python scripts/set_up.py test
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "joulelab needs Python 3.11 or newer, found $$($(PYTHON) --version). Try: make PYTHON=python3.13 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -m venv --upgrade-deps $(VENV) || \
	  { echo "python's venv module is missing (on Debian and Ubuntu: apt-get install python3-venv)"; rm -rf $(VENV); exit 2; }

# `twine check` reads the description as PyPI would render it. Neither needs joulelab's dependencies.
dist: | $(BIN)/python
	@$(BIN)/python -m pip install --quiet build twine
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

release: dist
	@if test "$(UPLOAD)" = yes; then $(BIN)/python -m twine upload dist/*; \
	  else echo "not uploaded; to upload: make release UPLOAD=yes"; fi

clean:
	rm -rf $(VENV)
