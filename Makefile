# make demo   installs into .venv and runs the main job
# make test   installs into .venv and runs the tests
# make test-vllm   installs vLLM for the CPU into .venv-vllm and runs the tests with its engine
# Needs Python 3.10 or newer (another one than python3: make demo PYTHON=python3.12), make and a C compiler.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-vllm lint bench

demo: $(INSTALLED)
	$(BIN)/python -m mmattn demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest tests/vllm

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m bench.run

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("mmattn needs Python 3.10 or newer, set PYTHON=..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,fa4]'
	touch $@

.venv-vllm/.installed: tests/vllm/install.sh tests/vllm/requirements.txt pyproject.toml
	tests/vllm/install.sh .venv-vllm $(PYTHON)
