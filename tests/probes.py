"""Three probes that tell right from wrong better than a tolerance, for one sequence under one mask.

* count: `q = 0` makes every visible key weigh the same, so LSE is `ln(count)` and indicator columns in V count the keys
  of every bucket.
* poison: V is 1e4 at every key that the row must not see (NaN past the last key), so one forbidden key shows.
* needle: one key dominates the scores and carries a marker in V; it must come through exactly when it is visible.

Expected visibility is given as numbers, `{row: (first key, last key)}`: absolute positions, both inclusive, or None for
a row that sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn import Mask, Plan, attention, plan

from .calls import skip_unsupported

Interval = tuple[int, int] | None
MARGIN = 8
"""Key slots of NaN after the last key."""
POISON = 1e4
MARKER = 8.0
MANY_ROWS = 128
"""As `max_seqlen_q`, an upper bound that makes a backend without a path for few rows take the call."""
NEEDLE_LOGIT = 30.0


@dataclass(frozen=True)
class Setup:
    """One sequence: its mask, its sizes, and how to run it."""

    mask: Mask
    q_len: int
    kv_len: int
    backend: str
    device: torch.device
    spans: Sequence[tuple[int, int]] = ()
    batch: tuple[tuple[str, int], ...] = ()
    """Other batch arguments, each a number for the one sequence: ("kv_lo", 5), ("causal", 0)."""
    dtype: torch.dtype = torch.float16
    head_dim: int = 64
    group: int = 2
    page: int | None = None
    alter: Callable[[Plan], Plan] | None = None
    """Replaces the plan by another one, to put a fault into it."""

    @property
    def q_start(self) -> int:
        given = dict(self.batch)
        return given.get("q_start", given.get("kv_start", 0) + self.kv_len - self.q_len)

    @property
    def kv_start(self) -> int:
        return dict(self.batch).get("kv_start", 0)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q `[q_len, H, D]`; k, v `[kv_len, Hkv, D]`, stored with NaN past the end, or in pages in reverse order."""
        args: dict[str, Any] = {name: self._vector(x) for name, x in self.batch}
        args["mm_prefix_range"] = [list(self.spans)]
        args["cu_seqlens_q"] = torch.tensor([0, self.q_len], dtype=torch.int32, device=self.device)
        args["seqused_k"] = self._vector(self.kv_len)
        if self.page is None:
            k, v = (_with_margin(x, self.kv_len + MARGIN)[None] for x in (k, v))
        else:
            count = -(-self.kv_len // self.page)
            k, v = (_with_margin(x, count * self.page).unflatten(0, (count, self.page)).flip(0) for x in (k, v))
            order = [*range(count - 1, -1, -1), 2**31 - 1]
            args["page_table"] = torch.tensor([order], dtype=torch.int32, device=self.device)
        if self.backend == "cute":
            args["max_seqlen_q"] = max(self.q_len, MANY_ROWS)
        the_plan = plan(self.mask, q=q, k=k, **args)
        if self.alter is not None:
            the_plan = self.alter(the_plan)
        skip_unsupported(self.backend, q, k, v, the_plan)
        return attention(q, k, v, the_plan, return_lse=True, backend=self.backend)

    def _vector(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=self.device)

    def randn(self, *shape: int) -> Tensor:
        random = torch.Generator().manual_seed(sum(shape))
        return torch.randn(*shape, generator=random).to(self.device, self.dtype)


def _with_margin(x: Tensor, slots: int) -> Tensor:
    padded = torch.full((slots, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device)
    padded[: x.shape[0]] = x
    return padded


def count_probe(setup: Setup, expected: dict[int, Interval]) -> None:
    """The number of visible keys and the number in each bucket, for every row of `expected`."""
    lse, buckets, which = _count(setup)
    for row, interval in expected.items():
        local = row - setup.q_start
        lo, hi = (0, -1) if interval is None else (interval[0] - setup.kv_start, interval[1] - setup.kv_start)
        count = hi - lo + 1
        got = float(lse[:, local].exp().mean())
        assert torch.equal(lse[:, local], lse[:1, local].expand(setup.group)), f"heads disagree at row {row}"
        assert abs(got - count) <= 0.1 + 1e-5 * count, f"row {row} sees {got:.2f} keys, not {count}"
        want = torch.stack([torch.bincount(b[lo : hi + 1], minlength=HALF) for b in which]).flatten()
        assert torch.equal(buckets[local], want), (
            f"row {row} must see keys {interval}: the buckets hold {buckets[local].tolist()}, not {want.tolist()}"
        )


HALF = 32
"""Buckets of each kind: key modulo 32, and key's 32nd part of the sequence."""


def _count(setup: Setup) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    key = torch.arange(setup.kv_len)
    which = (key % HALF, key * HALF // max(setup.kv_len, 1))
    columns = torch.cat([torch.nn.functional.one_hot(b, HALF) for b in which], dim=1)
    v = columns[:, None].to(setup.device, setup.dtype)
    q = torch.zeros(setup.q_len, setup.group, setup.head_dim, dtype=setup.dtype, device=setup.device)
    out, lse = setup.run(q, setup.randn(setup.kv_len, 1, setup.head_dim), v)
    counts = (out[:, 0].double() * lse[0].double().exp()[:, None]).round().nan_to_num(0).long()
    return lse.cpu(), counts.cpu(), which


def visible_counts(setup: Setup) -> list[int]:
    """How many keys every row sees."""
    return _count(setup)[0][0].exp().round().long().tolist()


def poison_probe(setup: Setup, expected: dict[int, Interval]) -> None:
    """No key outside the row's interval may leave a trace.

    Every row of `expected` has a head of its own, whose V is 1e4 there; the result is no larger than the largest
    visible value."""
    rows = list(expected)
    k = setup.randn(setup.kv_len, len(rows), setup.head_dim)
    q = setup.randn(setup.q_len, len(rows) * setup.group, setup.head_dim)
    v = setup.randn(setup.kv_len, len(rows), setup.head_dim)
    limit = []
    for head, row in enumerate(rows):
        allowed = torch.zeros(setup.kv_len, dtype=torch.bool, device=setup.device)
        interval = expected[row]
        if interval is not None:
            allowed[interval[0] - setup.kv_start : interval[1] - setup.kv_start + 1] = True
        limit.append(float(v[allowed, head].abs().max()) if interval is not None else 0.0)
        v[~allowed, head] = POISON
    out, _ = setup.run(q, k, v)
    for head, row in enumerate(rows):
        mine = out[row - setup.q_start, head * setup.group : (head + 1) * setup.group].float()
        assert mine.isfinite().all(), f"row {row} is not finite"
        largest = float(mine.abs().max())
        assert largest <= limit[head] * 1.01, (
            f"row {row} is {largest:.4g}, but no key of {expected[row]} exceeds {limit[head]:.4g}"
        )
        if expected[row] is not None:
            assert largest > 0, f"row {row} is all zero"


def needle_probe(setup: Setup, expected: dict[int, Interval]) -> None:
    """The keys at both ends of each row's interval come through, and their neighbours outside do not.

    Of two needles in one head each gets half of the weight and marks half of the columns.
    """
    half = setup.head_dim // 2
    for row, interval in expected.items():
        if interval is None:
            continue
        lo, hi = interval[0] - setup.kv_start, interval[1] - setup.kv_start
        # Head 0 hides needles inside, head 1 outside. All other keys score 0 and carry 0.
        k = torch.zeros(setup.kv_len, 2, setup.head_dim, dtype=setup.dtype, device=setup.device)
        v = torch.zeros_like(k)
        for head, (first, second) in enumerate(((lo, hi), (lo - 1, hi + 1))):
            for key, columns in ((first, slice(0, half)), (second, slice(half, None))):
                if 0 <= key < setup.kv_len:
                    k[key, head, 0] = NEEDLE_LOGIT * setup.head_dim**0.5 / 8
                    v[key, head, columns] = MARKER
        q = torch.zeros(setup.q_len, 2 * setup.group, setup.head_dim, dtype=setup.dtype, device=setup.device)
        q[..., 0] = 8
        out = setup.run(q, k, v)[0][row - setup.q_start].float().unflatten(-1, (2, half))
        share = MARKER if lo == hi else MARKER / 2
        for which, key in enumerate((lo, hi)):
            found = out[: setup.group, which]
            assert (found - share).abs().max() < MARKER * 0.01, (
                f"row {row} must see keys {interval}: the needle at key {key + setup.kv_start} is lost ({found.mean():.3g})"
            )
        for which, key in enumerate((lo - 1, hi + 1)):
            found = out[setup.group :, which]
            assert found.abs().max() < MARKER * 0.01, (
                f"row {row} must see keys {interval}: the needle at key {key + setup.kv_start} came through "
                f"({found.mean():.3g})"
            )


PROBES = {"count": count_probe, "poison": poison_probe, "needle": needle_probe}


def assert_sees(setup: Setup, expected: dict[int, Interval]) -> None:
    """All three probes."""
    for probe in PROBES.values():
        probe(setup, expected)
