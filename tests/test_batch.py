"""Bad input: the error names the argument, what was expected and what came, and nothing is written to `out`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmattn import Mask, MaskError, UnsupportedError, attention, plan, reference, supported

from .probes import MANY_ROWS

INT = torch.int32
SENTINEL = 7.0


def ints(*values: int, device: Any = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=INT, device=device)


class Call:
    """A good call, to be spoilt: two packed sequences of 5 and 3 rows, 6 and 4 keys, heads 4/2, head dim 16."""

    def __init__(self, device: torch.device, layout: str) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.float16, device=device)

        self.mask: Any = Mask()
        if layout == "batched":
            self.q, self.k = zeros(2, 5, 4, 16), zeros(2, 6, 2, 16)
            self.args: dict[str, Any] = {}
        else:
            self.q = zeros(8, 4, 16)
            self.args = dict(cu_seqlens_q=ints(0, 5, 8, device=device))
            if layout == "packed":
                self.k = zeros(10, 2, 16)
                self.args["cu_seqlens_k"] = ints(0, 6, 10, device=device)
            else:
                self.k = zeros(3, 4, 2, 16)
                self.args["seqused_k"] = ints(6, 4, device=device)
                self.args["page_table"] = torch.tensor([[0, 1], [2, 0]], dtype=INT, device=device)
        self.v = self.k.clone()
        self.out = torch.full_like(self.q, SENTINEL)

    def __call__(self) -> Any:
        args = {"out": self.out, **self.args}
        return attention(self.q, self.k, self.v, self.mask, **args)


def wide(x: torch.Tensor) -> torch.Tensor:
    """The same shape with a last stride of 2."""
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def column_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


# name -> (layout, what to spoil, words that the message must hold)
BAD: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "q rank": ("packed", lambda c: setattr(c, "q", c.q[0]), ("q ", "[T, Hq, D]", "[4, 16]")),
    "q rank 5": ("batched", lambda c: setattr(c, "q", c.q[None]), ("q ", "[B, S, Hq, D]", "[1, 2, 5, 4, 16]")),
    "k rank": ("packed", lambda c: setattr(c, "k", c.k[0]), ("k ", "[Tk, Hkv, D]", "[2, 16]")),
    "q no tensor": ("packed", lambda c: setattr(c, "q", [1.0]), ("q must be a tensor", "list")),
    "k no tensor": ("packed", lambda c: setattr(c, "k", None), ("k must be a tensor", "NoneType")),
    "k dtype": ("packed", lambda c: setattr(c, "k", c.k.float()), ("k ", "float16", "float32")),
    "v dtype": ("packed", lambda c: setattr(c, "v", c.v.bfloat16()), ("v ", "float16", "bfloat16")),
    "head counts": ("packed", lambda c: (setattr(c, "q", c.q[:, :3]), setattr(c, "out", c.out[:, :3])), ("heads", "2", "3", "divide")),
    "no heads": ("packed", lambda c: (setattr(c, "k", c.k[:, :0]), setattr(c, "v", c.v[:, :0])), ("0 heads", "4 heads")),
    "k head dim": ("packed", lambda c: setattr(c, "k", c.k[..., :8]), ("k ", "head dim 16", "8")),
    "head dim 0": ("packed", lambda c: (setattr(c, "q", c.q[..., :0]), setattr(c, "k", c.k[..., :0])), ("head dims", "positive", "0")),
    "v shape": ("packed", lambda c: setattr(c, "v", c.v[:9]), ("v ", "[10, 2]", "[9, 2, 16]")),
    "v heads": ("packed", lambda c: setattr(c, "v", c.v[:, :1]), ("v ", "[10, 2]", "[10, 1, 16]")),
    "q last stride": ("packed", lambda c: setattr(c, "q", wide(c.q)), ("q ", "last stride 1", "2)", "contiguous")),
    "k last stride": ("packed", lambda c: setattr(c, "k", column_major(c.k)), ("k ", "last stride 1", "contiguous")),
    "v last stride": ("batched", lambda c: setattr(c, "v", wide(c.v)), ("v ", "last stride 1", "contiguous")),
    "mask type": ("packed", lambda c: setattr(c, "mask", "causal"), ("mask ", "mmattn.Mask", "str")),
    "unknown argument": ("packed", lambda c: c.args.update(causual=1), ("causual", "causal")),
    "backend": ("packed", lambda c: c.args.update(backend="fa4"), ("backend", "'triton'", "'fa4'")),
    # Lengths and positions.
    "cu_seqlens_q dtype": ("packed", lambda c: c.args.update(cu_seqlens_q=c.args["cu_seqlens_q"].long()), ("cu_seqlens_q", "int32", "int64")),
    "cu_seqlens_k dtype": ("packed", lambda c: c.args.update(cu_seqlens_k=c.args["cu_seqlens_k"].float()), ("cu_seqlens_k", "int32", "float32")),
    "cu_seqlens_q list": ("packed", lambda c: c.args.update(cu_seqlens_q=[0, 5, 8]), ("cu_seqlens_q", "int32 tensor", "[0, 5, 8]")),
    "cu_seqlens_q past the rows": ("packed", lambda c: c.args["cu_seqlens_q"][-1:].add_(1), ("cu_seqlens_q ends at", "rows")),
    "cu_seqlens_q rank": ("packed", lambda c: c.args.update(cu_seqlens_q=c.args["cu_seqlens_q"][None]), ("cu_seqlens_q", "[any number]", "[1, 3]")),
    "cu_seqlens_q empty": ("packed", lambda c: c.args.update(cu_seqlens_q=c.args["cu_seqlens_q"][:0]), ("cu_seqlens_q", "batch_size + 1")),
    "cu_seqlens_k size": ("packed", lambda c: c.args.update(cu_seqlens_k=c.args["cu_seqlens_k"][:2]), ("cu_seqlens_k", "[3]", "[2]")),
    "cu_seqlens_q with batched q": ("batched", lambda c: c.args.update(cu_seqlens_q=ints(0, 5, 10, device=c.q.device)), ("cu_seqlens_q", "packed q", "[2, 5, 4, 16]")),
    "cu_seqlens_k with batched k": ("batched", lambda c: c.args.update(cu_seqlens_k=ints(0, 6, 12, device=c.q.device)), ("cu_seqlens_k", "packed k", "[2, 6, 2, 16]")),
    "k of other batch size": ("batched", lambda c: (setattr(c, "k", c.k[:1]), setattr(c, "v", c.v[:1])), ("k ", "holds 1 sequences", "q holds 2")),
    "seqused_k dtype": ("paged", lambda c: c.args.update(seqused_k=c.args["seqused_k"].long()), ("seqused_k", "int32", "int64")),
    "seqused_k size": ("paged", lambda c: c.args.update(seqused_k=c.args["seqused_k"][:1]), ("seqused_k", "[2]", "[1]")),
    "q_start size": ("packed", lambda c: c.args.update(q_start=ints(0, device=c.q.device)), ("q_start", "[2]", "[1]")),
    "kv_start dtype": ("packed", lambda c: c.args.update(kv_start=torch.zeros(2, device=c.q.device)), ("kv_start", "int32", "float32")),
    "kv_lo size": ("packed", lambda c: c.args.update(kv_lo=ints(0, 0, 0, device=c.q.device)), ("kv_lo", "[2]", "[3]")),
    "causal bool": ("packed", lambda c: c.args.update(causal=True), ("causal", "int32 tensor", "True")),
    "causal dtype": ("packed", lambda c: c.args.update(causal=torch.ones(2, dtype=torch.bool, device=c.q.device)), ("causal", "int32", "bool")),
    "max_seqlen_q tensor": ("packed", lambda c: c.args.update(max_seqlen_q=torch.tensor(5)), ("max_seqlen_q", "host integer", "int64")),
    "max_seqlen_k negative": ("packed", lambda c: c.args.update(max_seqlen_k=-1), ("max_seqlen_k", ">= 0", "-1")),
    "max_seqlen_q too small": ("batched", lambda c: c.args.update(max_seqlen_q=4), ("max_seqlen_q=4", "5")),
    # Pages.
    "page_table with cu_seqlens_k": ("paged", lambda c: c.args.update(cu_seqlens_k=ints(0, 6, 10, device=c.q.device)), ("page_table", "seqused_k", "cu_seqlens_k")),
    "page_table without seqused_k": ("paged", lambda c: c.args.pop("seqused_k"), ("page_table", "seqused_k")),
    "page_table dtype": ("paged", lambda c: c.args.update(page_table=c.args["page_table"].long()), ("page_table", "int32", "int64")),
    "page_table rows": ("paged", lambda c: c.args.update(page_table=c.args["page_table"][:1]), ("page_table", "[2, any number]", "[1, 2]")),
    "page_table with packed k": ("packed", lambda c: (c.args.pop("cu_seqlens_k"), c.args.update(seqused_k=ints(6, 4, device=c.q.device), page_table=ints(0, 1, device=c.q.device)[:, None])), ("page_table", "[P, page, Hkv, D]", "[10, 2, 16]")),
    "empty pages": ("paged", lambda c: (setattr(c, "k", c.k[:, :0]), setattr(c, "v", c.v[:, :0])), ("pages", "at least one key", "[3, 0, 2, 16]")),
    # Spans.
    "overlapping spans": ("packed", lambda c: c.args.update(mm_prefix_range=[[], [(0, 2), (2, 3)]]), ("(0, 2)", "(2, 3)", "sequence 1", "overlap")),
    "nested spans": ("packed", lambda c: c.args.update(mm_prefix_range=[[(0, 5), (2, 3)], []]), ("(0, 5)", "(2, 3)", "sequence 0", "overlap")),
    "reversed span": ("packed", lambda c: c.args.update(mm_prefix_range=[[], [(3, 1)]]), ("(3, 1)", "sequence 1", "backwards")),
    "negative span": ("packed", lambda c: c.args.update(mm_prefix_range=[[(-2, 1)], []]), ("(-2, 1)", "sequence 0")),
    "too many span lists": ("packed", lambda c: c.args.update(mm_prefix_range=[[], [], []]), ("mm_prefix_range", "2", "3 lists")),
    "too few span lists": ("packed", lambda c: c.args.update(mm_prefix_range=[[]]), ("mm_prefix_range", "2", "1 lists")),
    "flat span list": ("packed", lambda c: c.args.update(mm_prefix_range=[(0, 2), (3, 4)]), ("span of sequence 0", "(start, end)", "0")),
    "span of three": ("packed", lambda c: c.args.update(mm_prefix_range=[[(0, 2, 4)], []]), ("span of sequence 0", "(0, 2, 4)")),
    "float span": ("packed", lambda c: c.args.update(mm_prefix_range=[[(0.0, 2.0)], []]), ("span of sequence 0", "integers", "(0.0, 2.0)")),
    "span tensor dtype": ("packed", lambda c: c.args.update(mm_prefix_range=torch.zeros(2, 1, 2, device=c.q.device)), ("mm_prefix_range", "int32", "float32")),
    "span tensor shape": ("packed", lambda c: c.args.update(mm_prefix_range=torch.zeros(2, 2, dtype=INT, device=c.q.device)), ("mm_prefix_range", "[2, any number, 2]", "[2, 2]")),
    "query range shape": ("packed", lambda c: c.args.update(mm_prefix_query_range=torch.zeros(7, 2, dtype=INT, device=c.q.device)), ("mm_prefix_query_range", "[8, 2]", "[7, 2]")),
    "both span forms": ("packed", lambda c: c.args.update(mm_prefix_range=[[], []], mm_prefix_query_range=torch.zeros(8, 2, dtype=INT, device=c.q.device)), ("mm_prefix_range", "mm_prefix_query_range", "not both")),
    "chunk, clamp and spans": ("packed", lambda c: (setattr(c, "mask", Mask.chunked(4, mm_prefix_clamp=True)), c.args.update(mm_prefix_range=[[(0, 2)], []])), ("chunk_size=4", "mm_prefix_clamp", "spans")),
    # Scalars and outputs.
    "scale nan": ("packed", lambda c: c.args.update(scale=float("nan")), ("scale", "finite", "nan")),
    "scale negative": ("packed", lambda c: c.args.update(scale=-1.0), ("scale", ">= 0", "-1.0")),
    "softcap zero": ("packed", lambda c: c.args.update(softcap=0.0), ("softcap", "None", "0.0")),
    "softcap infinite": ("packed", lambda c: c.args.update(softcap=float("inf")), ("softcap", "finite", "inf")),
    "sinks size": ("packed", lambda c: c.args.update(sinks=torch.zeros(2, device=c.q.device)), ("sinks", "[4]", "[2]")),
    "sinks dtype": ("packed", lambda c: c.args.update(sinks=ints(0, 0, 0, 0, device=c.q.device)), ("sinks", "floating-point", "int32")),
    "out shape": ("packed", lambda c: setattr(c, "out", c.out[:7]), ("out ", "[8, 4, 16]", "[7, 4, 16]")),
    "out dtype": ("packed", lambda c: setattr(c, "out", c.out.float()), ("out ", "float16", "float32")),
    "out last stride": ("packed", lambda c: setattr(c, "out", wide(c.out)), ("out ", "last stride 1", "2)")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, device: torch.device) -> None:
    layout, spoil, words = BAD[name]
    call = Call(device, layout)
    call()  # good as it stands
    call.out.fill_(SENTINEL)
    spoil(call)
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)
    assert (call.out == SENTINEL).all(), "out was written"


def test_only_a_mask_error_for_an_impossible_mask(device: torch.device) -> None:
    for name in ("overlapping spans", "reversed span", "too many span lists", "chunk, clamp and spans"):
        call = Call(device, "packed")
        BAD[name][1](call)
        with pytest.raises(MaskError):
            call()


def test_supported_and_plan_check_like_attention(device: torch.device) -> None:
    for name in (
        "overlapping spans",
        "cu_seqlens_q dtype",
        "cu_seqlens_k size",
        "too few span lists",
        "max_seqlen_q tensor",
    ):
        call = Call(device, "packed")
        BAD[name][1](call)
        with pytest.raises(ValueError) as error:
            supported(call.q, call.k, call.v, call.mask, **call.args)
        assert BAD[name][2][0] in str(error.value)
        with pytest.raises(ValueError) as error:
            plan(call.mask, q=call.q, k=call.k, **call.args)
        assert BAD[name][2][0] in str(error.value)
        with pytest.raises(ValueError) as error:
            reference(call.q, call.k, call.v, call.mask, **call.args)
        assert BAD[name][2][0] in str(error.value)


@pytest.mark.parametrize("head_dim", [513, 576])
def test_head_dim_over_the_limit(head_dim: int, device: torch.device) -> None:
    x = torch.zeros(4, 1, head_dim, dtype=torch.float16, device=device)
    out = torch.full_like(x, SENTINEL)
    with pytest.raises(UnsupportedError) as error:
        attention(x, x, x, Mask(), backend="triton", out=out)
    assert f"head dims {head_dim}/{head_dim} exceed 512" in str(error.value)
    assert (out == SENTINEL).all()
    assert attention(x, x, x, Mask(), backend="torch").shape == x.shape  # any head dim


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v", "cu_seqlens_q", "cu_seqlens_k", "sinks", "out"])
def test_cpu_and_gpu_mixed(name: str, device: torch.device) -> None:
    call = Call(device, "packed")
    call.args["sinks"] = torch.zeros(4, device=device)
    if name in ("k", "v", "out"):
        setattr(call, name, getattr(call, name).cpu())
    else:
        call.args[name] = call.args[name].cpu()
    with pytest.raises(ValueError) as error:
        call()
    assert name in str(error.value) and "cuda" in str(error.value) and "cpu" in str(error.value), str(error.value)
    assert (call.out == SENTINEL).all()


def test_devices_mixed() -> None:
    """The same without a GPU: "meta" is a device like any other."""
    for name in ("k", "v", "cu_seqlens_q", "sinks", "out"):
        call = Call(torch.device("cpu"), "packed")
        call.args["sinks"] = torch.zeros(4)
        if name in ("k", "v", "out"):
            setattr(call, name, getattr(call, name).to("meta"))
        else:
            call.args[name] = call.args[name].to("meta")
        with pytest.raises(ValueError) as error:
            call()
        assert name in str(error.value) and "meta" in str(error.value) and "cpu" in str(error.value), str(error.value)


def test_out_with_grad_is_refused(device: torch.device) -> None:
    call = Call(device, "packed")
    call.q.requires_grad_()
    with pytest.raises(UnsupportedError) as error:
        call()
    assert "out= does not work where an input requires grad" in str(error.value)
    assert (call.out == SENTINEL).all()


# With a plan.


def test_a_plan_takes_no_batch_arguments(device: torch.device) -> None:
    call = Call(device, "packed")
    the_plan = plan(call.mask, q=call.q, k=call.k, **call.args)
    with pytest.raises(ValueError, match=r"cu_seqlens_q.*came with a Plan.*plan\(\)"):
        attention(call.q, call.k, call.v, the_plan, **call.args)


def test_a_plan_for_another_batch(device: torch.device) -> None:
    call = Call(device, "packed")
    the_plan = plan(call.mask, q=call.q, k=call.k, **call.args)
    with pytest.raises(ValueError, match=r"8 packed rows.*\[7, 4, 16\]"):
        attention(call.q[:7], call.k, call.v, the_plan)
    other = Call(device, "batched")
    the_plan = plan(other.mask, q=other.q, k=other.k)
    with pytest.raises(ValueError, match=r"2 sequences of 5 rows.*\[2, 4, 4, 16\]"):
        attention(other.q[:, :4], other.k, other.v, the_plan)
    with pytest.raises(ValueError, match=r"2 sequences of 6 keys.*\[2, 5, 2, 16\]"):
        attention(other.q, other.k[:, :5], other.v[:, :5], the_plan)
    with pytest.raises(ValueError, match="page_table was given, but the plan"):
        attention(other.q, other.k, other.v, the_plan, page_table=torch.zeros(2, 1, dtype=INT, device=device))


def test_sizes_that_a_plan_cannot_know() -> None:
    with pytest.raises(ValueError, match="needs q, total_q or max_seqlen_q"):
        plan(Mask(), cu_seqlens_q=ints(0, 4))
    with pytest.raises(ValueError, match="needs q or max_seqlen_q"):
        plan(Mask(), batch_size=2, max_seqlen_k=4)
    with pytest.raises(ValueError, match="needs k, seqused_k, cu_seqlens_k or max_seqlen_k"):
        plan(Mask(), max_seqlen_q=4)
    with pytest.raises(ValueError, match="batch_size=3, but cu_seqlens_q holds 1"):
        plan(Mask(), cu_seqlens_q=ints(0, 4), total_q=4, batch_size=3, max_seqlen_k=4)


# Values on the device: only with MMATTN_DEBUG=1.

VALUES: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "cu_seqlens_q start": ("packed", lambda d: dict(cu_seqlens_q=ints(1, 5, 8, device=d)), ("cu_seqlens_q", "start at 0", "1")),
    "cu_seqlens_q falls": ("packed", lambda d: dict(cu_seqlens_q=ints(0, 9, 8, device=d)), ("cu_seqlens_q", "9 to 8", "sequence 1")),
    "cu_seqlens_k falls": ("packed", lambda d: dict(cu_seqlens_k=ints(0, -1, 8, device=d)), ("cu_seqlens_k", "0 to -1", "sequence 0")),
    "cu_seqlens_q past q": ("packed", lambda d: dict(cu_seqlens_q=ints(0, 5, 12, device=d)), ("cu_seqlens_q", "12", "8 rows")),
    "cu_seqlens_k past k": ("packed", lambda d: dict(cu_seqlens_k=ints(0, 5, 12, device=d)), ("cu_seqlens_k", "12", "10")),
    "seqused_k negative": ("paged", lambda d: dict(seqused_k=ints(6, -4, device=d)), ("seqused_k", "sequence 1", "-4")),
    "seqused_k past the table": ("paged", lambda d: dict(seqused_k=ints(6, 9, device=d)), ("seqused_k", "sequence 1", "9", "8 keys")),
    "page id": ("paged", lambda d: dict(page_table=torch.tensor([[0, 3], [2, 0]], dtype=INT, device=d)), ("page_table[0, 1]", "3", "0..2")),
    "spans overlap": ("packed", lambda d: dict(mm_prefix_range=torch.tensor([[[-1, -1]] * 2, [[2, 3], [0, 2]]], dtype=INT, device=d)), ("(0, 2)", "(2, 3)", "sequence 1", "overlap")),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_bad_values_in_debug_mode(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMATTN_DEBUG", "1")
    layout, spoil, words = VALUES[name]
    call = Call(device, layout)
    call()
    call.out.fill_(SENTINEL)
    call.args.update(spoil(device))
    with pytest.raises(ValueError) as error:
        call()
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)
    assert (call.out == SENTINEL).all(), "out was written"


def test_debug_mode_lets_unneeded_table_entries_be(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMATTN_DEBUG", "1")
    call = Call(device, "paged")
    call.args["page_table"] = torch.tensor([[0, 1, -5], [2, 99, 99]], dtype=INT, device=device)
    call()


# Valid, though it may look odd.


def test_empty_batch(backend: str, device: torch.device) -> None:
    q = torch.zeros(0, 4, 16, dtype=torch.float16, device=device)
    k = torch.zeros(0, 2, 16, dtype=torch.float16, device=device)
    zero = ints(0, device=device)
    args = dict(cu_seqlens_q=zero, cu_seqlens_k=zero, max_seqlen_q=MANY_ROWS, backend=backend)
    out, lse = attention(q, k, k, Mask(), return_lse=True, **args)
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0)
    for b, s in ((0, 70), (2, 0)):
        if backend == "cute" and s == 0:
            continue  # it takes no few rows
        q = torch.zeros(b, s, 4, 16, dtype=torch.float16, device=device)
        k = torch.zeros(b, 3, 2, 16, dtype=torch.float16, device=device)
        out, lse = attention(q, k, k, Mask(), return_lse=True, backend=backend)
        assert out.shape == q.shape and lse.shape == (b, 4, s)


def test_batch_without_rows_of_any_sequence(backend: str, device: torch.device) -> None:
    """Padding rows of a CUDA graph, and no sequence at all."""
    q = torch.full((3, 4, 16), float("nan"), dtype=torch.float16, device=device)
    k = torch.zeros(2, 2, 16, dtype=torch.float16, device=device)
    zero = ints(0, device=device)
    args = dict(cu_seqlens_q=zero, cu_seqlens_k=zero, max_seqlen_q=MANY_ROWS, backend=backend)
    out, lse = attention(q, k, k, Mask(), return_lse=True, **args)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_one_sequence_may_be_packed_without_lengths(backend: str, device: torch.device) -> None:
    x = torch.randn(70, 2, 16, device=device).half()
    packed = attention(x, x, x, Mask(), backend=backend)
    batched = attention(x[None], x[None], x[None], Mask(), backend=backend)
    assert torch.equal(packed, batched[0])
