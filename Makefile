# Everything a fresh machine needs: Python 3.11 or newer (with venv), make, and a package index.
PYTHON ?= python3
PYTEST_WORKERS ?= 2
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
BIN := .venv/bin
MARKS ?= not slow

.PHONY: install demo docs test test-all test-thorough test-faults test-slow test-optimised test-versions margins release lint format clean
install: .venv/installed

.venv/installed: WHAT = '.[vit,experiments]' --group dev
.venv-demo/installed: WHAT = '.[vit]'
.venv/installed .venv-demo/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) \
	    else f"performer needs Python 3.11 or newer, this is {v}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(@D)/bin/pip install --quiet --editable $(WHAT)
	@touch $@

demo: .venv-demo/installed  ## train a small Performer-ViT on scikit-learn's digits, in an environment without developers' tools
	.venv-demo/bin/performer-vit train --config=digits --workdir=runs/demo

test: install  ## finds a fault of every promised property
	$(BIN)/pytest -n $(PYTEST_WORKERS) --dist worksteal

test-thorough: install  ## what `make test` leaves to test-all: whole commands, wheels, crossings
	$(BIN)/pytest -n $(PYTEST_WORKERS) --dist worksteal -m "thorough and not slow"

test-all: test test-thorough  ## everything but the long statistical runs

test-faults: install  ## plants faults, one at a time, and checks that a test fails
	$(BIN)/python -m tests.faults

test-slow: install  ## only the long statistical runs
	$(BIN)/pytest -n $(PYTEST_WORKERS) -m slow

test-optimised: install  ## `make test` compiled as for users, whose fusions round otherwise
	PERFORMER_TEST_OPTIMISED=1 $(BIN)/pytest -n $(PYTEST_WORKERS) --dist worksteal

margins: install  ## how near assertions come to their limits on three kinds of processor, and optimised
	@mkdir -p results/margins
	@for isa in SSE4_2 AVX2 AVX512 optimised; do \
	    if test $$isa = optimised; then export PERFORMER_TEST_OPTIMISED=1; else export PERFORMER_TEST_ISA=$$isa; fi; \
	    PYTHONPYCACHEPREFIX=results/margins/pyc $(BIN)/pytest -n $(PYTEST_WORKERS) --dist worksteal -q -p tests.support.margins \
	        --margins=results/margins/$$isa.json -o enable_assertion_pass_hook=true \
	        -o verbosity_assertions=2 -m "$(MARKS)" || true; \
	    unset PERFORMER_TEST_ISA; \
	done
	$(BIN)/python -m tests.support.margins results/margins

test-versions:  ## `make test` under each installed Python of PYTHONS, with the newest releases of all packages
	@for python in $(PYTHONS); do \
	    $$python --version > /dev/null 2>&1 || { echo "$$python is not installed: left out"; continue; }; \
	    echo "$$python:"; $$python -m venv .venv-$$python && \
	    .venv-$$python/bin/pip install --quiet --upgrade "pip>=25.1" && \
	    .venv-$$python/bin/pip install --quiet --upgrade --upgrade-strategy eager --editable '.[vit,experiments]' --group dev && \
	    .venv-$$python/bin/pytest -n $(PYTEST_WORKERS) --dist worksteal || exit 1; \
	done

docs: .venv/docs  ## builds the documentation into docs/_build/html; all code on its pages runs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

.venv/docs: .venv/installed
	$(BIN)/pip install --quiet --group docs
	@touch $@

release: install  ## builds and checks dist/: make release REPOSITORY=https://github.com/you/performer
	@$(BIN)/pip install --quiet --group release
	$(BIN)/python -m tests.release "$(REPOSITORY)"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-* .pytest_cache .ruff_cache docs/_build
