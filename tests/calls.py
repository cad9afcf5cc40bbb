"""Calls as dispatch sees them, without tensors; and calls that a backend refuses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from mmattn import supported
from mmattn.batch import Call


def skip_unsupported(backend: str, *call: Any, **args: Any) -> None:
    """Skips the test, with the backend's own reasons, if it cannot run this call of `attention()`."""
    against = supported(*call, **args)[backend]
    if against:
        pytest.skip(f"{backend}: {'; '.join(against)}")


def hopper(**changes: Any) -> Call:
    """A call that every backend could run on an H100 with flash-attn-4 installed."""
    plain = dict(
        device_type="cuda", capability=(9, 0), dtype=torch.bfloat16, kv_dtype=torch.bfloat16, heads_q=8, heads_kv=4,
        head_dim=128, head_dim_v=128, packed_q=True, packed_k=True, page_size=None, aligned=True,
    )  # fmt: skip
    off = {field.name: False for field in fields(Call) if field.name not in plain}
    if "dtype" in changes and "kv_dtype" not in changes:
        changes["kv_dtype"] = changes["dtype"]
    return Call(**{**plain, **off, **changes})
