"""The CuTe backward without a GPU: what it refuses, the tables it walks, and what its kernels can read.

The kernels are compiled by `tests/test_cute_compile.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmattn
from mmattn import Mask
from mmattn.cute import support

from .calls import hopper, skip_unsupported
from .cases import BY_NAME, build

needs_fa4 = pytest.mark.skipif(
    support.installed_version() != support.PINNED, reason=f"needs {support.PACKAGE} {support.PINNED}"
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(), None),
        (dict(softcap=True, sinks=True, packed_q=False, packed_k=False, aligned=False, split_kv=True), None),
        (dict(head_dim=256, head_dim_v=256), None),
        (dict(head_dim=72, head_dim_v=72, dtype=torch.float16), None),
        (dict(head_dim=192, head_dim_v=128, heads_q=4), None),
        (dict(head_dim=192, head_dim_v=128), "192/128 with 2 query heads per KV head"),
        (dict(head_dim=64, heads_q=4), "gradients for head dims 64/128: only equal ones"),
        (dict(head_dim=60, head_dim_v=60), "only multiples of 8 up to 256"),
        (dict(head_dim=512, head_dim_v=512), "only multiples of 8 up to 256"),
        (dict(dtype=torch.float32), "float32 is not float16 or bfloat16"),
        (dict(kv_dtype=torch.float8_e4m3fn), "no float8"),
        (dict(scales=True), "k_scale"),
        (dict(page_size=16), "no gradients for paged k and v"),
        (dict(capability=(10, 0)), "compute capability 10.0: only on compute capability 9.0"),
        (dict(capability=(8, 0)), "compute capability 8.0: only on compute capability 9.0"),
        (dict(device_type="cpu", capability=None), "gradients on cpu"),
    ],
)
def test_what_has_no_gradients(changes: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "installed_version", lambda: support.PINNED)
    reasons = support.why_no_gradients(hopper(grad=True, **changes))
    if words is None:
        assert reasons == []
    else:
        assert len(reasons) == 1 and words in reasons[0]


@pytest.mark.parametrize("version", [None, support.OLDEST, "4.1.0"])
def test_gradients_need_the_pinned_release(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "installed_version", lambda: version)
    (reason,) = support.why_no_gradients(hopper(grad=True))
    assert f"pip install {support.PACKAGE}=={support.PINNED}" in reason


MASKS = st.one_of(
    st.sampled_from([Mask(), Mask.full()]),
    st.builds(Mask.sliding_window, st.integers(1, 9), causal=st.booleans(), mm_prefix_clamp=st.booleans()),
    st.builds(Mask.chunked, st.integers(1, 8), lookback=st.integers(0, 2)),
    st.builds(Mask, causal=st.just(False), window_left=st.integers(0, 6), window_right=st.integers(0, 6)),
)


@settings(deadline=None, max_examples=200)
@given(mask=MASKS, q_len=st.integers(1, 40), k_len=st.integers(1, 40), data=st.data())
def test_a_key_tile_meets_a_row_tile_from_both_sides(mask: Mask, q_len: int, k_len: int, data: st.DataObject) -> None:
    """In order, dQ is added up from the last key tile that a row tile touches to the first. A key tile takes its turn from
    the rows' table and its row tiles from the keys' table: a tile of one that the other does not have would wait for ever."""
    args: dict[str, Any] = {}
    if mask.chunk_size is None and data.draw(st.booleans()):
        lengths = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), max_size=5))
        spans, at = [], 0
        for gap, length in lengths:
            spans.append((at + gap, at + gap + length))
            at += gap + length + 1
        args["mm_prefix_range"] = [spans]
    for name in ("seqused_k", "kv_lo"):
        if data.draw(st.booleans()):
            args[name] = torch.tensor([data.draw(st.integers(0, k_len))], dtype=torch.int32)
    q, k = torch.zeros(1, q_len, 1, 8), torch.zeros(1, k_len, 1, 8)
    plan = mmattn.plan(mask, q=q, k=k, **args)
    tile_m, tile_n = data.draw(st.sampled_from([(4, 8), (8, 4), (1, 1), (3, 5)]))
    keys, rows = plan.column_tiles(k_len, tile_n, tile_m).ranges, plan.tiles(tile_m, 1, tile_n).ranges
    m, n = torch.arange(rows.shape[0]), torch.arange(keys.shape[0])[:, None]
    from_keys = (keys[:, :1] <= m) & (m < keys[:, 3:])
    from_rows = (rows[:, 0] <= n) & (n < rows[:, 3])
    assert torch.equal(from_keys, from_rows)


@needs_fa4
def test_gradients_are_made_readable() -> None:
    from mmattn.cute.backward_sm90 import _readable

    x = torch.randn(6, 2, 16, dtype=torch.bfloat16)
    assert _readable(x) is x and _readable(x[1:, :1]).data_ptr() == x[1:].data_ptr()
    for unreadable in (x[:1].expand(6, -1, -1), torch.ones((), dtype=x.dtype).expand(6, 2, 16), x.mT, x[..., 1:9]):
        copy = _readable(unreadable)
        assert copy.is_contiguous() and torch.equal(copy, unreadable)


GRADIENTS = [
    "packed-causal", "packed-full", "packed-window", "packed-symmetric", "packed-chunked-lookback", "packed-spans-window-long",
    "packed-spans-clamped", "packed-spans-by-row", "packed-mixed-causality", "batched-spans-clamped", "strided-window",
    "softcap-packed", "sinks-packed", "dims-256-256-packed", "dims-192-128-packed", "group-3", "rows-past-end-packed",
]  # fmt: skip


@needs_fa4
@pytest.mark.gpu
@pytest.mark.parametrize("in_order", [False, True], ids=["", "in order"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_against_the_oracle(name: str, in_order: bool, device: torch.device) -> None:
    """Also: no NaN around the inputs reaches a gradient, and adding up in order gives the same bits again."""
    inputs = build(BY_NAME[name].grown(), device)
    args = {key: value for key, value in inputs.args.items() if key != "sinks"}
    leaves = [inputs.q, inputs.k, inputs.v] + ([inputs.args["sinks"]] if "sinks" in inputs.args else [])
    weights, found = {}, []

    def gradients(compute: Any, dtype: torch.dtype | None) -> list[torch.Tensor]:
        mine = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
        out, lse = compute(*mine[:3], inputs.mask, **args, **(dict(sinks=mine[3]) if mine[3:] else {}))
        for key, x in (("out", out), ("lse", lse)):
            weights.setdefault(key, torch.randn(x.shape, device=device))
        lse = lse.masked_fill(lse == -torch.inf, 0)
        loss = (out * weights["out"].to(out.dtype)).sum() + (lse * weights["lse"].to(lse.dtype)).sum() / 7
        return list(torch.autograd.grad(loss, mine))

    skip_unsupported("cute", inputs.q, inputs.k, inputs.v, inputs.mask, requires_grad=True, **inputs.args)
    if torch.are_deterministic_algorithms_enabled() != in_order:
        torch.use_deterministic_algorithms(in_order)
    try:
        for _ in range(2):
            found.append(gradients(partial(mmattn.attention, return_lse=True, backend="cute"), None))
    finally:
        torch.use_deterministic_algorithms(False)
    want = gradients(mmattn.reference, torch.float64)
    eager = gradients(partial(mmattn.reference, dtype=inputs.q.dtype), None)
    for got, again, exact, rounded in zip(*found, want, eager):
        assert got.isfinite().all()
        top = exact.abs().max()
        budget = 2 * (rounded.double() - exact).abs().max() + 2 * torch.finfo(got.dtype).eps * top
        assert (got.double() - exact).abs().max() <= budget
        assert not in_order or torch.equal(got, again)
