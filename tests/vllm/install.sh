#!/usr/bin/env bash
# Installs vLLM's CPU engine, the version that tests/vllm ran with, and mmattn in editable form into a venv of its own:
# it brings its own torch. Usage: tests/vllm/install.sh [FOLDER [PYTHON]]
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-.venv-vllm}
python=${2:-python3}

"$python" -m venv "$venv"
"$venv/bin/python" -m pip install -r tests/vllm/requirements.txt
# These two are built for CUDA and break the import of transformers beside torch for the CPU; nothing here needs them.
"$venv/bin/python" -m pip uninstall -y torchaudio torchcodec
# So is torchvision, but vLLM's Gemma models import its Python part, which works alone: only the file that describes its
# compiled operators to torch stops the import.
: > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py"
"$venv/bin/python" -m pip install --no-deps -e .
touch "$venv/.installed"
