# Everything runs in a virtual environment of this folder, made on first use and kept until
# pyproject.toml, constraints.txt or the folder's place changes.
#
#   make demo      answer a prompt through the server, with and without speculation
#   make test      the tests that finish in minutes      (ARGS="tests/kernels -k window" for some)
#   make test-all  the long ones too
#   make bench     times of the parts, saved as JSON under .benchmarks/
#   make kernels   compile every GPU kernel for every target and compare with the committed table;
#                  needs no GPU                        (ARGS=--update after a change that is meant)
#   make gpu-check correctness, bits and times of the kernels where a GPU is, in under 6 minutes
#   make lint types proto-check    what .ci/run checks before it tests
#   make format proto              rewrite what lint and proto-check complain about
#   make clean     remove the environment and everything built
#
# PYTHON=/path/to/python chooses the interpreter of a new environment (3.11 or newer).

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all bench kernels gpu-check lint format types proto proto-check clean

PYTHON ?=
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
KEY := $(shell { cat pyproject.toml constraints.txt; pwd; } | cksum | cut -d " " -f 1)
READY := $(VENV)/.ready-$(KEY)

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

$(READY):
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
		for candidate in "$(PYTHON)" python3 python3.13 python3.12 python3.11 python3.14 python; do \
			[ -n "$$candidate" ] || continue; \
			if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
				>/dev/null 2>&1; then found=$$candidate; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "No Python 3.11 or newer with the venv module was found on PATH." >&2; \
			echo "Install one (on Debian and Ubuntu: python3 and python3-venv)," \
				"or say where it is: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $$("$$found" --version)"; \
		"$$found" -m venv --clear $(VENV); \
	fi
	@echo "Installing torch (1 of 2)"
	@$(PY) -m pip install --disable-pip-version-check -c constraints.txt torch
	@echo "Installing specdec and its tools (2 of 2)"
	@$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.ready-*
	@touch $@

demo: $(READY)
	@$(PY) -m specdec demo $(ARGS)

test: $(READY)
	@$(PY) -m pytest $(ARGS)

test-all: $(READY)
	@$(PY) -m pytest --slow $(ARGS)

bench: $(READY)
	@mkdir -p .benchmarks
	@$(PY) -m pytest tests/benchmarks/bench_*.py --benchmark-json=.benchmarks/latest.json \
		--benchmark-columns=median,iqr,min,max,rounds --benchmark-sort=name $(ARGS)

kernels: $(READY)
	@$(PY) -m specdec_kernels.checks.gate $(ARGS)

gpu-check: $(READY)
	@$(PY) -m specdec_kernels.checks.gpu $(ARGS)

lint: $(READY)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(VENV)/bin/lint-imports --no-logo

format: $(READY)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

types: $(READY)
	@$(PY) -m mypy

proto: $(READY)
	@$(PY) proto/generate.py

proto-check: $(READY)
	@$(PY) proto/generate.py --check

clean:
	rm -rf $(VENV) build dist *.egg-info .benchmarks .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
