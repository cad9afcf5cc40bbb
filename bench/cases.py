"""The workloads, named after real models: shapes, masks, lengths and spans, and random inputs of that shape.

Every case exists in two sizes: the real one, and a reduced one (same structure, few tokens, small heads) on which
CPU tests check definitions, work models and providers.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmattn import Mask

Span = tuple[int, int]


@dataclass(frozen=True)
class Sequence:
    """One request: `q_len` rows, the last of which meets the last of `kv_len` keys; spans are inclusive positions."""

    q_len: int
    kv_len: int
    spans: tuple[Span, ...] = ()

    @property
    def context(self) -> int:
        return self.kv_len - self.q_len


def _family(name: str) -> str:
    return name.rstrip(string.ascii_lowercase)


@dataclass(frozen=True)
class Case:
    """One attention call of a model."""

    name: str
    title: str
    source: str
    """Where the shapes come from."""
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    mask: Mask
    sequences: tuple[Sequence, ...]
    page_size: int | None = None
    sinks: bool = False
    decode: bool = False
    """Limited by memory: judged by bandwidth, timed on rotating data larger than the L2 cache."""
    float8: bool = False
    """K and V are float8_e4m3fn."""

    @property
    def family(self) -> str:
        """`W2` for `W2b`."""
        return _family(self.name)

    @property
    def batched(self) -> bool:
        """Whole sequences of one length and no pages: the layout `[B, S, H, D]`."""
        return self.page_size is None and len({(s.q_len, s.kv_len) for s in self.sequences}) == 1

    @property
    def has_spans(self) -> bool:
        return any(s.spans for s in self.sequences)

    @property
    def total_q(self) -> int:
        return sum(s.q_len for s in self.sequences)

    def without_spans(self) -> Case:
        """The same call without its images: what a kernel that knows no spans computes."""
        return replace(self, sequences=tuple(replace(s, spans=()) for s in self.sequences))

    def causal_only(self) -> Case:
        """The same call with a plain causal mask."""
        return replace(self.without_spans(), mask=Mask.causal_())


Pick = Callable[[Any, Any], Any]
_BUILDERS: dict[str, Callable[[str, Pick], Case]] = {}


def _case(*names: str) -> Callable[[Callable[[str, Pick], Case]], Callable[[str, Pick], Case]]:
    def register(build: Callable[[str, Pick], Case]) -> Callable[[str, Pick], Case]:
        for name in names:
            _BUILDERS[name] = build
        return build

    return register


def names() -> list[str]:
    """Every case of `bench.run`, in order."""
    return [name for name in _BUILDERS if name not in TRAINING]


def make(name: str, *, reduced: bool = False) -> Case:
    """The case of that name, at its real size or reduced for a CPU."""
    case = _BUILDERS[name](name, lambda full, small: small if reduced else full)
    if not reduced:
        return case
    heads_kv = min(case.heads_kv, 2)
    return replace(
        case, heads_kv=heads_kv, heads_q=heads_kv * case.heads_q // case.heads_kv,
        head_dim=case.head_dim // 4, head_dim_v=case.head_dim_v // 4,
    )  # fmt: skip


def select(wanted: Iterable[str]) -> list[str]:
    """Names of cases from names or families (`W2` = W2 and W2b); all cases from nothing. Raises `KeyError`."""
    wanted = list(wanted)
    if not wanted:
        return names()
    chosen: list[str] = []
    for want in wanted:
        hits = [n for n in names() if want in (n, _family(n))]
        if not hits:
            raise KeyError(f"no case {want!r}; there are {', '.join(names())}")
        chosen += [n for n in hits if n not in chosen]
    return chosen


def images(length: int, *, every: int, size: int, first: int = 0) -> tuple[Span, ...]:
    """One image of `size` tokens in every `every` tokens, with text before the first one and between all."""
    before = max(1, (every - size) // 3)
    starts = range(first + before, length, every)
    return tuple((start, min(start + size, length) - 1) for start in starts if start + 1 < length)


_GEMMA4 = (
    "google/gemma-4-31B-it config.json: window 1024 and 32/16 heads of 256 on sliding layers, 32/4 heads of 512 on "
    "global ones; 280 tokens an image, 70 a video frame"
)
_GEMMA3 = (
    "google/gemma-3 config.json: window 1024, images see themselves on all layers; 32/8 heads of 128 "
    "(gemma-3-27b-it has 32/16)"
)
_QWEN3 = "Qwen/Qwen3-8B config.json: 32/8 heads of 128"


def _gemma4_sliding(
    name: str, title: str, sequences: Iterable[Sequence], pick: Pick, page_size: int | None = None
) -> Case:
    mask = Mask.sliding_window(pick(1024, 64), mm_prefix_clamp=True)
    return Case(name, title, _GEMMA4, 32, 16, 256, 256, mask, tuple(sequences), page_size)


def _gemma3(name: str, title: str, mask: Mask, sequences: Iterable[Sequence], page_size: int | None = None) -> Case:
    return Case(name, title, _GEMMA3, 32, 8, 128, 128, mask, tuple(sequences), page_size)


@_case("W1", "W1n")
def _w1(name: str, pick: Pick) -> Case:
    length = pick(32768, 320)
    spans = images(length, every=pick(512, 64), size=pick(280, 35)) if name == "W1" else ()
    about = "64 images" if spans else "no image"
    return _gemma4_sliding(name, f"Gemma 4 sliding layer, 32k, {about}", [Sequence(length, length, spans)], pick)


@_case("W2", "W2b", "W2c")
def _w2(name: str, pick: Pick) -> Case:
    q_len, kv_len = pick(8192, 128), pick(147456, 640)
    spans = images(kv_len, every=pick(512, 64), size=pick(280, 35))
    page = {"W2": pick(64, 16), "W2b": pick(16, 4), "W2c": None}[name]
    about = f"pages of {page}" if page else "contiguous"
    return _gemma4_sliding(
        name, f"Gemma 4 sliding layer, chunk of 8k after 136k, {about}", [Sequence(q_len, kv_len, spans)], pick, page
    )


@_case("W3")
def _w3(name: str, pick: Pick) -> Case:
    length = pick(16384, 320)
    spans = images(length, every=pick(512, 64), size=pick(280, 35))
    return _gemma3(name, "Gemma 3 global layer, 16k, 32 images", Mask.causal_(), [Sequence(length, length, spans)])


@_case("W4")
def _w4(name: str, pick: Pick) -> Case:
    length = pick(16384, 320)
    spans = images(length, every=pick(512, 64), size=pick(280, 35))
    mask = Mask.sliding_window(pick(1024, 48))
    return _gemma3(name, "Gemma 3 sliding layer, 16k, 32 images", mask, [Sequence(length, length, spans)])


@_case("W5")
def _w5(name: str, pick: Pick) -> Case:
    q_len, kv_len = pick(8192, 128), pick(65536, 512)
    spans = images(kv_len, every=pick(512, 64), size=pick(280, 35))
    title = "Gemma 3 global layer, chunk of 8k after 56k, pages of 128"
    return _gemma3(name, title, Mask.causal_(), [Sequence(q_len, kv_len, spans)], pick(128, 32))


@_case("W6")
def _w6(name: str, pick: Pick) -> Case:
    length = pick(16384, 256)
    title = "Gemma 4 global layer, 16k, head dim 512"
    return Case(name, title, _GEMMA4, 32, 4, 512, 512, Mask.causal_(), (Sequence(length, length),))


_WIDE = {
    "W7j": ("google/gemma-3-12b-it config.json, a global layer: 16/8 heads of 256", 16, 8, 256),
    "W7k": ("google/gemma-4-31B-it config.json, a global layer: 32/4 heads of 512", 32, 4, 512),
}


@_case("W7", "W7b", "W7c", "W7d", "W7e", "W7f", "W7g", "W7h", "W7i", "W7j", "W7k", "W7l")
def _w7(name: str, pick: Pick) -> Case:
    batch, rows, length, window = {
        "W7": (pick(64, 4), 1, 32768, None),
        "W7c": (pick(64, 4), 1, 32768, 1024),
        "W7d": (1, 1, 131072, 1024),
        "W7e": (1, 16, 131072, None),
        "W7f": (1, 1, 4096, 1024),
        "W7g": (1, 1, 262144, 1024),
        "W7h": (pick(64, 4), 1, 32768, None),
        "W7l": (pick(64, 4), 1, 8192, None),
    }.get(name, (1, 1, 131072, None))
    source, heads_q, heads_kv, d = _WIDE.get(name, (_QWEN3, 32, 8, 128))
    float8 = name in ("W7h", "W7i")
    keys = pick(length, length // 256)
    mask = Mask.causal_() if window is None else Mask.sliding_window(pick(window, window // 64))
    about = f"{batch} x {length // 1024}k"
    about += (f", {rows} rows to verify" if rows > 1 else "") + (f", window {window}" if window else "")
    about += (", float8 K and V" if float8 else "") + (f", head dim {d}" if d > 128 else "")
    return Case(
        name, f"decode, {about}", source, heads_q, heads_kv, d, d, mask, (Sequence(rows, keys),) * batch, 16,
        decode=True, float8=float8,
    )  # fmt: skip


@_case("W8", "W8b")
def _w8(name: str, pick: Pick) -> Case:
    rows, length = 16, pick(32768, 112) + 16
    mask = Mask.full() if name == "W8" else Mask.sliding_window(pick(2048, 32), causal=False)
    about = "not causal" if name == "W8" else "symmetric window 2048, sinks"
    return Case(
        name, f"DFlash draft, 32 requests x 16 rows after 32k, {about}",
        f"z-lab/dflash drafters for Qwen3-8B: blocks of 16 rows; {_QWEN3}",
        32, 8, 128, 128, mask, (Sequence(rows, length),) * pick(32, 3), 16, sinks=name == "W8b", decode=True,
    )  # fmt: skip


@_case("W9")
def _w9(name: str, pick: Pick) -> Case:
    length, batch = pick(1024, 96), pick(16, 3)
    prefix = [length // 2 + (length // (2 * batch)) * b for b in range(batch)]
    return Case(
        name, "PaliGemma prefix-LM, 16 x 1k, prefixes of 512 to 992",
        "google/paligemma-3b-pt-448 config.json: 8/1 heads of 256; image and prompt see themselves",
        8, 1, 256, 256, Mask.causal_(), tuple(Sequence(length, length, ((0, n - 1),)) for n in prefix),
    )  # fmt: skip


@_case("W10", "W10b")
def _w10(name: str, pick: Pick) -> Case:
    length = pick(16384, 256)
    window = None if name == "W10" else pick(1024, 32)
    mask = Mask.causal_() if window is None else Mask.sliding_window(window)
    about = "causal" if window is None else "window 1024"
    return Case(name, f"text only, 16k, {about}", _QWEN3, 32, 8, 128, 128, mask, (Sequence(length, length),))


@_case("W11")
def _w11(name: str, pick: Pick) -> Case:
    length = pick(32768, 256)
    return Case(
        name, "MiMo V2 sliding layer, 32k, window 128, sinks",
        "XiaomiMiMo/MiMo-V2-Flash: sliding layers have 64/8 heads of 192/128, window 128 and sinks",
        64, 8, 192, 128, Mask.sliding_window(pick(128, 8)), (Sequence(length, length),), sinks=True,
    )  # fmt: skip


@_case("W12")
def _w12(name: str, pick: Pick) -> Case:
    frames, every = pick(512, 10), pick(80, 24)
    length = frames * every
    spans = images(length, every=every, size=pick(70, 20))
    title = f"Gemma 4 sliding layer, video of {frames} frames"
    return _gemma4_sliding(name, title, [Sequence(length, length, spans)], pick)


@_case("W13", "W13b", "W13c")
def _w13(name: str, pick: Pick) -> Case:
    def chunk(before: int) -> Sequence:
        rows = pick(1024, 64)
        kv_len = rows + before * pick(4096, 64)
        return Sequence(rows, kv_len, images(kv_len, every=pick(512, 64), size=pick(280, 35)))

    if name == "W13c":
        few = [Sequence(rows, pick(16384, 48) * n) for rows, n in ((1, 8), (1, 4), (1, 2), (1, 1), (pick(8, 2), 4))]
        title = "2 chunks with images + 4 decode rows up to 128k + 8 rows of drafts, pages of 16"
        shared = "; tensor parallel on 4 GPUs: 8/2 heads"
        return Case(
            name, f"Gemma 3 global layer on 1 of 4 GPUs, {title}", _GEMMA3 + shared, 8, 2, 128, 128, Mask.causal_(),
            (chunk(1), chunk(1), *few), 16,
        )  # fmt: skip
    prefill = [chunk(i) for i in range(pick(8, 2))]
    decode = [Sequence(1, pick(1024, 48) + i * pick(563, 7)) for i in range(pick(56, 5))]
    mix, title = (*prefill, *decode), "8 chunks with images + 56 decode rows, pages of 16"
    if name == "W13":
        return _gemma3(name, f"Gemma 3 global layer, {title}", Mask.causal_(), mix, 16)
    return _gemma4_sliding(name, f"Gemma 4 sliding layer, {title}", mix, pick, 16)


TRAINING = ("T1", "T2", "T3", "T4")
"""Cases that `bench.backward` trains on."""


@_case(*TRAINING)
def _t(name: str, pick: Pick) -> Case:
    """What fine-tuning runs: forward and backward, see `bench.backward`."""
    if name == "T1":
        return replace(_w1("W1", pick), name=name)
    if name == "T2":
        return replace(_w3("W3", pick), name=name)
    if name == "T3":
        length = pick(4096, 96)
        documents = [Sequence(length, length, images(length, every=pick(512, 64), size=pick(280, 35)))] * pick(8, 3)
        packed = [*documents[:-1], Sequence(length - pick(96, 5), length - pick(96, 5), documents[0].spans[:-1])]
        mask = Mask.sliding_window(pick(1024, 48))
        return _gemma3(name, "Gemma 3 sliding layer, 8 packed documents of 4k with images", mask, packed)
    length = pick(32768, 256)
    return Case(
        name, "gpt-oss sliding layer, 32k, window 128, sinks",
        "openai/gpt-oss-20b config.json: 64/8 heads of 64, sliding layers with window 128, sinks on all layers",
        64, 8, 64, 64, Mask.sliding_window(pick(128, 8)), (Sequence(length, length),), sinks=True,
    )  # fmt: skip


SWEEP_LENGTHS = tuple(1024 * 2**i for i in range(9))
"""1k to 256k."""


def sweep(length: int) -> Case:
    """W1's layer at another length: time per token and the cost of a mask against context length."""
    spans = images(length, every=512, size=280)
    title = f"Gemma 4 sliding layer, {length} tokens"
    return _gemma4_sliding(f"S{length}", title, [Sequence(length, length, spans)], lambda full, small: full)


@dataclass(eq=False)
class Inputs:
    """Random tensors of a case, in the layout that its serving code would use."""

    case: Case
    q: Tensor
    """`[B, S, Hq, D]` where `case.batched`, else packed `[T, Hq, D]`."""
    k: Tensor
    """`[B, S, Hkv, D]`, `[Tk, Hkv, D]`, or pages `[P, page, Hkv, D]`."""
    v: Tensor
    sinks: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor
    page_tables: list[Tensor]
    """Empty where not paged; else the same lengths over other pages, to be used in turn. The gate uses the first."""
    max_seqlen_q: int
    max_seqlen_k: int
    shared: dict[str, Any] = field(default_factory=dict)
    """What providers of this case share, compiled functions for one."""

    @property
    def device(self) -> torch.device:
        return self.q.device

    def page_table(self, i: int = 0) -> Tensor | None:
        return self.page_tables[i % len(self.page_tables)] if self.page_tables else None

    def batch_args(self, case: Case | None = None) -> dict[str, Any]:
        """The batch arguments of `mmattn.plan()`; of `case` instead of the own one (other spans) where it is given."""
        case = self.case if case is None else case
        args: dict[str, Any] = {}
        if case.has_spans:
            width = max(len(s.spans) for s in case.sequences)
            padded = [[*s.spans, *[(-1, -1)] * (width - len(s.spans))] for s in case.sequences]
            args["mm_prefix_range"] = torch.tensor(padded, dtype=torch.int32, device=self.device)
        if case.batched:
            return args
        args.update(cu_seqlens_q=self.cu_seqlens_q, max_seqlen_q=self.max_seqlen_q, max_seqlen_k=self.max_seqlen_k)
        if self.page_tables:
            args.update(seqused_k=self.seqused_k, page_table=self.page_tables[0])
        else:
            args.update(cu_seqlens_k=self.cu_seqlens_k)
        return args


def make_inputs(
    case: Case, device: torch.device | str, dtype: torch.dtype, *, touched: int = 0, l2: int = 0, seed: int = 0
) -> Inputs:
    """Random inputs.

    A decode call that touches fewer than twice `l2` bytes of K and V gets a pool of pages of at least that size, and
    page tables to rotate through, so that no call finds its data in the cache.
    """
    kv_dtype = dtype
    if case.float8:
        dtype, kv_dtype = torch.float16 if dtype is torch.float32 else dtype, torch.float8_e4m3fn
    generator = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    q_lens, kv_lens = [s.q_len for s in case.sequences], [s.kv_len for s in case.sequences]
    cu_q, cu_k = ([0, *torch.tensor(lens).cumsum(0).tolist()] for lens in (q_lens, kv_lens))
    tables: list[Tensor] = []
    lead_q: tuple[int, ...] = (cu_q[-1],)
    lead_k: tuple[int, ...] = (cu_k[-1],)
    if case.batched:
        lead_q, lead_k = (len(q_lens), q_lens[0]), (len(q_lens), kv_lens[0])
    if case.page_size is not None:
        needed = [math.ceil(n / case.page_size) for n in kv_lens]
        pages, width, copies = sum(needed), max(needed), 1
        if case.decode and 0 < touched < 2 * l2:
            page_bytes = case.page_size * case.heads_kv * (case.head_dim + case.head_dim_v) * (1 if case.float8 else 2)
            pages, copies = max(pages, math.ceil(2 * l2 / page_bytes)), min(64, math.ceil(2 * l2 / touched))
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        for i in range(copies):
            turned = order.roll(i * pages // copies).to(torch.int32)
            table = torch.zeros(len(needed), width, dtype=torch.int32)
            first = 0
            for b, n in enumerate(needed):
                table[b, :n] = turned[first : first + n]
                first += n
            tables.append(table.to(device))
        lead_k = (pages, case.page_size)
    cu_seqlens_q, cu_seqlens_k, seqused_k = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (cu_q, cu_k, kv_lens)
    )
    return Inputs(
        case=case,
        q=randn(*lead_q, case.heads_q, case.head_dim),
        k=randn(*lead_k, case.heads_kv, case.head_dim).to(kv_dtype),
        v=randn(*lead_k, case.heads_kv, case.head_dim_v).to(kv_dtype),
        sinks=randn(case.heads_q) if case.sinks else None,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        page_tables=tables,
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max(kv_lens),
    )
