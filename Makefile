# `make demo` and `make test` do all the set-up themselves: a virtual environment in .venv, then the package built and installed.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := pyproject.toml CMakeLists.txt $(shell find src csrc -type f -not -name '*.pyc')

.PHONY: demo info test lint types pytest mutation build clean

demo: .venv/installed  ## a first minute: every scope on a tensor with outliers, then SmoothQuant
	$(BIN)/baracuda demo

info: .venv/installed  ## what runs on this machine
	$(BIN)/baracuda info

test: lint types pytest  ## everything a change must pass

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

pytest: .venv/installed
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

mutation: .venv/installed  ## break the reference one line at a time; every mutant must be caught
	$(BIN)/python tests/mutation.py

build: .venv/installed

.venv/requirements: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	touch $@

.venv/installed: .venv/requirements $(SOURCES)
	$(BIN)/pip install --quiet -c constraints.txt '.[test,lint]'
	touch $@

clean:
	rm -rf .venv build dist
