# make demo   installs into .venv and runs the main job
# make test   installs into .venv and runs the tests
# make test-vllm   installs vLLM for the CPU into .venv-vllm and runs the tests with its engine
# make test-hf-oldest   installs the oldest supported transformers into .venv-hf-oldest and runs some of its tests
# Needs Python 3.10 or newer (another one than python3: make demo PYTHON=python3.12), make and a C compiler.

PYTHON ?= python3
HF_OLDEST := 5.10.1
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-vllm test-hf-oldest lint bench

demo: $(INSTALLED)
	$(BIN)/python -m mmattn demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest tests/vllm

test-hf-oldest: .venv-hf-oldest/.installed
	.venv-hf-oldest/bin/python -m pytest tests/test_hf.py tests/test_hf_models.py

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

# constraints.txt without its section for hf: that is what differs here.
.venv-hf-oldest/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv-hf-oldest
	sed '/^# hf$$/,/^$$/d' constraints.txt > .venv-hf-oldest/constraints.txt
	.venv-hf-oldest/bin/python -m pip install -c .venv-hf-oldest/constraints.txt -e '.[hf,draw]' transformers==$(HF_OLDEST) pytest hypothesis
	touch $@
