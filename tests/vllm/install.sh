#!/usr/bin/env bash
# Installs vLLM's CPU engine, the version that tests/vllm ran with, and mmattn in editable form into a venv of its own:
# it brings its own torch. Usage: tests/vllm/install.sh [FOLDER [PYTHON]]
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-.venv-vllm}
python=${2:-python3}

"$python" -m venv "$venv"
"$venv/bin/python" -m pip install -r tests/vllm/requirements.txt
# The registry's builds of these three are for CUDA and break the import of transformers beside torch for the CPU.
"$venv/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec
"$venv/bin/python" -m pip install --no-deps -e .
touch "$venv/.installed"
