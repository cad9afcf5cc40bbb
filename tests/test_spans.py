"""Spans and masks from token types, block ids, vLLM ranges, per-row tensors and configs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmattn import Mask, MaskError, attention, reference
from mmattn import spans as sp

BLOCKS = torch.tensor([[-1, 0, 0, 0, 1, 1, -1, 2], [5, 5, -1, -1, 7, -1, 8, 8]])


def test_block_ids() -> None:
    assert sp.spans_from_block_ids(BLOCKS) == [[(1, 3), (4, 5), (7, 7)], [(0, 1), (4, 4), (6, 7)]]
    assert sp.spans_from_block_ids(BLOCKS[0]) == [[(1, 3), (4, 5), (7, 7)]]
    assert sp.spans_from_block_ids(torch.full((2, 3), -1)) == [[], []]
    assert sp.spans_from_block_ids(torch.zeros(1, 0, dtype=torch.long)) == [[]]


def test_a_block_in_two_pieces_is_an_error() -> None:
    with pytest.raises(MaskError, match="sequence 1 occurs in two separate runs"):
        sp.spans_from_block_ids(torch.tensor([[-1, 0, -1, 1], [0, 0, -1, 0]]))
    assert sp.repeated(torch.tensor([[-1, 0, -1]])).tolist() == [False]
    assert sp.repeated(torch.tensor([[-1, 0, -1]]), negative=True).tolist() == [True]


def test_token_types() -> None:
    types = torch.tensor([[0, 1, 1, 0, 1, 2, 2, 0, 3]])
    assert sp.spans_from_token_types(types) == [[(1, 2), (4, 4)]]
    assert sp.spans_from_token_types(types, (1, 2)) == [[(1, 2), (4, 6)]]  # touching items merge
    assert sp.spans_from_token_types(types, (0,)) == [[(0, 0), (3, 3), (7, 7)]]
    assert sp.block_ids_from_token_types(types[0], (1, 2)).tolist() == [-1, 0, 0, -1, 1, 1, 1, -1, -1]


@pytest.mark.parametrize("bad", [torch.zeros(2, 3), torch.zeros(1, 2, 3, dtype=torch.long), [[0, 1]]])
def test_ids_must_be_integers(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"integer tensor \[B, S\]"):
        sp.spans_from_block_ids(bad)


def test_token_types_follow_transformers() -> None:
    gemma3 = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    gemma4 = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    types = torch.randint(0, 4, (8, 64), generator=torch.Generator().manual_seed(0))
    for module, members in ((gemma3, (1,)), (gemma4, (1, 2))):
        expected = module.get_block_sequence_ids_for_mask(types, device=types.device)
        assert torch.equal(sp.block_ids_from_token_types(types, members), expected)


@st.composite
def disjoint_spans(draw: Any) -> list[list[tuple[int, int]]]:
    batch = []
    for _ in range(draw(st.integers(1, 3))):
        spans, at = [], 0
        for gap, length in draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=5)):
            spans.append((at + gap, at + gap + length - 1))
            at += gap + length
        batch.append(spans)
    return batch


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(disjoint_spans(), st.integers(0, 9), st.integers(0, 40))
def test_every_form_says_the_same(spans: list[list[tuple[int, int]]], start: int, length: int) -> None:
    batch = len(spans)
    ids = torch.full((batch, 64), -1)
    for b, mine in enumerate(spans):
        for block, (s, e) in enumerate(mine):
            ids[b, s : e + 1] = block
    assert sp.spans_from_block_ids(ids) == spans
    rows = sp.query_spans_from_spans(spans, [length] * batch, [start] * batch)
    by_ids = sp.query_spans_from_block_ids(ids, start, length)
    assert rows.dtype == by_ids.dtype == torch.int32 and by_ids.shape == (batch, length, 2)
    one_token = by_ids[..., 0] == by_ids[..., 1]  # (s, s) and (-1, -1) are both no span
    assert torch.equal(rows.view(batch, length, 2), by_ids.masked_fill(one_token[..., None], -1))
    back = sp.spans_from_query_spans(rows, [length] * batch)
    end = start + length
    assert back == [[(s, e) for s, e in mine if s < e and max(s, start) < min(e + 1, end)] for mine in spans]
    on_device = sp.query_spans_from_block_ids(ids, torch.tensor([start] * batch), length)
    assert torch.equal(on_device, by_ids)


def test_rows_past_the_ids_have_no_span() -> None:
    assert sp.query_spans_from_block_ids(torch.tensor([[0, 0]]), 1, 3)[0].tolist() == [[0, 1], [-1, -1], [-1, -1]]
    assert sp.query_spans_from_block_ids(torch.tensor([[0, 0]]), 1).tolist() == [[[0, 1]]]
    assert sp.query_spans_from_block_ids(torch.zeros(1, 0, dtype=torch.long), 0, 1).tolist() == [[[-1, -1]]]
    with pytest.raises(ValueError, match="q_len"):
        sp.query_spans_from_block_ids(torch.tensor([[0, 0]]), torch.tensor(1))


def test_vllm_ranges() -> None:
    ranges = {0: [(2, 9), (12, 12)], 2: [(0, 3)]}
    assert sp.spans_from_vllm(ranges, 3) == [[(2, 9), (12, 12)], [], [(0, 3)]]
    # Longer than the window and not clamped: vLLM leaves the range out everywhere.
    assert sp.spans_from_vllm(ranges, 3, sliding_window=7) == [[(12, 12)], [], [(0, 3)]]
    assert sp.spans_from_vllm(ranges, 3, sliding_window=8) == sp.spans_from_vllm(ranges, 3)
    assert sp.spans_from_vllm(ranges, 3, sliding_window=7, clamp=True) == sp.spans_from_vllm(ranges, 3)
    with pytest.raises(ValueError, match="request 2"):
        sp.spans_from_vllm(ranges, 2)


def test_per_row_tensors_feed_attention() -> None:
    q, k, v = torch.randn(3, 20, 2, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    spans, mask = [[(3, 9), (12, 18)]], Mask.sliding_window(4)
    rows = sp.query_spans_from_spans(spans, [20], [0])
    out = attention(q, k, v, mask, mm_prefix_query_range=rows)
    torch.testing.assert_close(out, reference(q, k, v, mask, mm_prefix_range=spans)[0].float())


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="one entry per sequence"):
        sp.query_spans_from_spans([[]], [1, 2], [0])
    with pytest.raises(ValueError, match="sum"):
        sp.spans_from_query_spans(torch.zeros(3, 2, dtype=torch.int32), [2])


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(num_hidden_layers=2, **fields)


MIXED = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)


@pytest.mark.parametrize(
    ("given_config", "expected"),
    [
        (config(), [(Mask(), False)] * 2),
        (config(sliding_window=None), [(Mask(), False)] * 2),
        (config(sliding_window=8), [(Mask.sliding_window(8), False)] * 2),
        (config(attention_chunk_size=8), [(Mask.chunked(8), False)] * 2),
        (config(**MIXED), [(Mask.sliding_window(8), False), (Mask(), False)]),
        (
            config(is_causal=False, **MIXED),
            [(Mask(causal=False, window_left=8, window_right=8), False), (Mask.full(), False)],
        ),
        (
            config(layer_types=["chunked_attention", "full_attention"], attention_chunk_size=8),
            [(Mask.chunked(8), False), (Mask(), False)],
        ),
        (
            SimpleNamespace(model_type="gemma3", text_config=config(**MIXED)),
            [(Mask.sliding_window(8, mm_prefix_clamp=True), True), (Mask(), True)],
        ),
        (
            SimpleNamespace(model_type="gemma4", text_config=config(use_bidirectional_attention="vision", **MIXED)),
            [(Mask.sliding_window(8, mm_prefix_clamp=True), True), (Mask(), False)],
        ),
        (
            SimpleNamespace(model_type="gemma4", text_config=config(use_bidirectional_attention=None, **MIXED)),
            [(Mask.sliding_window(8), False), (Mask(), False)],
        ),
        (
            SimpleNamespace(model_type="paligemma", text_config=config(**MIXED)),
            [(Mask.sliding_window(8), True), (Mask(), True)],
        ),
    ],
)
def test_layer_mask(given_config: Any, expected: list[tuple[Mask, bool]]) -> None:
    assert [sp.layer_mask(given_config, i) for i in range(2)] == [sp.LayerMask(*e) for e in expected]


@pytest.mark.parametrize(
    ("given_config", "layer", "problem"),
    [
        (config(), 2, "layer_idx must lie in 0..1, got 2"),
        (config(layer_types=["linear_attention", "full_attention"]), 0, "'linear_attention'"),
        (config(layer_types=["sliding_attention", "full_attention"]), 0, "no sliding_window"),
        (config(layer_types=["chunked_attention", "full_attention"]), 0, "no attention_chunk_size"),
    ],
)
def test_layer_mask_refuses(given_config: Any, layer: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        sp.layer_mask(given_config, layer)


def test_layer_masks_are_those_of_the_models() -> None:
    """Against what the real models build for a prompt with an image."""
    pytest.importorskip("transformers")
    import mmattn.hf
    from mmattn.hf import attention as hf_attention

    from .hf_models import TEXT_MODELS, VISION_MODELS, text_model, vision_model

    mmattn.hf.register()
    cases: list[tuple[Any, dict[str, Any], list[list[tuple[int, int]]]]] = [
        (text_model(m.name), {"input_ids": torch.arange(3, 33)[None]}, [[]]) for m in TEXT_MODELS
    ]
    for m in VISION_MODELS:
        prefix = m.name.startswith("PaliGemma")
        cases.append((vision_model(m.name, 8), m.inputs([5, "image", 6]), [[(0, 23)] if prefix else [(5, 20)]]))
    for model, inputs, spans in cases:
        seen: dict[int, torch.Tensor] = {}
        real = hf_attention._as_intervals

        def watched(where: str, mask: Any, query: Any, key: Any, *rest: Any) -> Any:
            intervals = real(where, mask, query, key, *rest)
            seen[int(where.split("layer ")[1].split(" ")[0])] = intervals.rows[0]
            return intervals

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(hf_attention, "_as_intervals", watched)
            model.set_attn_implementation("mmattn")
            model(**inputs)
        for i in range(model.config.get_text_config().num_hidden_layers):
            mask, with_spans = sp.layer_mask(model.config, i)
            length = inputs["input_ids"].shape[1]
            plan = mmattn.plan(mask, total_q=length, max_seqlen_k=length, mm_prefix_range=spans if with_spans else None)
            assert torch.equal(plan.rows, seen[i]), f"{type(model).__name__}, layer {i}"
