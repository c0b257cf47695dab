# Everything that is done to this checkout. `make help` lists it; only CPython >= 3.10, pip and make are asked for.

# The interpreter that .venv is made with, and the number of processes that the tests run in.
PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := -m pip install --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/pytest --numprocesses $(JOBS) --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help install demo bench test test-deep coverage lint format types wheel-test clean

help:  ## list the targets
	@awk -F ':.*##' '/^[a-z-]+:.*##/ {printf "make %-11s%s\n", $$1, $$2}' Makefile

install: $(INSTALLED)  ## make .venv and install tritonamp into it, editable, with all that the other targets need

# Without pip in it, .venv is missing or was left half-made. Installed again only when the requirements have changed.
$(INSTALLED): pyproject.toml constraints.txt
	$(BIN)/python -m pip --version || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python $(PIP_INSTALL) --editable '.[dev]'
	touch $@

demo: $(INSTALLED)  ## train on handwritten digits twice, with torch's three calls and with tritonamp, and compare
	$(BIN)/python examples/digits.py

bench: $(INSTALLED)  ## time steps against torch's, on a GPU if there is one; results in build/bench
	$(BIN)/python -m bench run

# Triton decides when a kernel is defined whether to compile or to interpret it: each needs processes of its own.
# One thread for each process: the tensors are small, and waiting threads would take the cores from other processes.
test test-deep coverage: export OMP_NUM_THREADS ?= 1
test: $(INSTALLED)  ## run the tests, with compiled kernels and with interpreted ones
	$(PYTEST) -m "not interpreted"
	TRITON_INTERPRET=1 $(PYTEST) -m "not compiled"

# Interpreted kernels know no architecture: of their tests, only those of the laws draw more.
test-deep: export HYPOTHESIS_PROFILE := nightly
test-deep: $(INSTALLED)  ## run the kernels' tests for every architecture, and check the laws on thousands of examples
	$(PYTEST) -m "not interpreted"
	TRITON_INTERPRET=1 $(PYTEST) -m "not compiled" tests/property

coverage: $(INSTALLED)  ## run the tests and report the lines and branches they miss
	$(PYTEST) -m "not interpreted" --cov --cov-report=
	TRITON_INTERPRET=1 $(PYTEST) -m "not compiled" --cov --cov-append --cov-report=term-missing:skip-covered

lint: $(INSTALLED) types  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## mend what can be mended without thinking
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy does not see that an editable installation maps tritonamp.kernels to kernels/: show it the package as installed.
types:
	rm -rf build/types
	mkdir -p build/types/tritonamp
	ln -s "$(CURDIR)"/tritonamp/* "$(CURDIR)/kernels" build/types/tritonamp

# The sdist first, then the wheel from the sdist: what is missing from either shows. `-I` hides the checkout.
wheel-test: $(INSTALLED)  ## build sdist and wheel, and train with the wheel installed in an environment of its own
	rm -rf build/wheel-test
	$(BIN)/python -m build --no-isolation --outdir build/wheel-test/dist
	$(BIN)/python -m venv build/wheel-test/venv
	build/wheel-test/venv/bin/python $(PIP_INSTALL) build/wheel-test/dist/*.whl
	build/wheel-test/venv/bin/python -I tests/packaging/smoke.py

clean:  ## remove what was built, but not .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .coverage digits.png
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
