# Two commands: `make demo` (the main job) and `make test` (lint, types, tests). Both set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.biascope-installed

.PHONY: demo test lint types unit wheel docs bench clean help

help:
	@echo "make demo   set up, make the bias card of LeNet, print where the page is"
	@echo "make test   set up, then lint, types and all tests"
	@echo "make wheel  build sdist and wheel, and use the wheel in an empty environment"
	@echo "make docs   build the documentation site into site/"
	@echo "make bench  benchmarks against the rivals that are installed"

$(STAMP): pyproject.toml requirements/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/cpu.txt -e ".[cli,plot,dev,docs]"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/biascope card lenet

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: export OMP_NUM_THREADS ?= 1
unit: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal --durations 15

wheel: $(STAMP)
	.ci/wheel

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

bench: $(STAMP)
	$(BIN)/biascope bench ntk

clean:
	rm -rf $(VENV) site runs .mypy_cache .ruff_cache .pytest_cache
