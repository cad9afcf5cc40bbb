"""The benchmark itself, on a CPU: cases, work model, oracle gate, semantics of providers, comparison and plots."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import mmattn
from bench import cases, fa4, flex, gate, plot, providers, targets, timing
from bench import run as bench_run
from bench.cases import Case, Sequence, make, make_inputs, names
from bench.compare import load, verdict
from bench.compare import main as compare_main
from bench.peers import CannotRun
from bench.work import work
from mmattn import Mask

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def visible(case: Case, b: int) -> torch.Tensor:
    """The dense mask of one sequence, from the definition."""
    s = case.sequences[b]
    q, k = torch.arange(s.context, s.kv_len)[:, None], torch.arange(s.kv_len)[None]
    return case.mask.visible(q, k, spans=s.spans)


def inputs_of(case: Case, seed: int = 0) -> cases.Inputs:
    return make_inputs(case, "cpu", torch.float32, seed=seed)


# Definitions.


def test_every_workload_is_there() -> None:
    assert {make(name).family for name in names()} == {f"W{i}" for i in range(1, 14)}
    assert cases.select(["W2"]) == ["W2", "W2b", "W2c"] and cases.select(["W7b"]) == ["W7b"]
    assert cases.select([]) == names()
    with pytest.raises(KeyError, match="W99"):
        cases.select(["W99"])


@pytest.mark.parametrize("name", names())
def test_definition(name: str) -> None:
    full, small = make(name), make(name, reduced=True)
    for case in (full, small):
        assert case.name == name and case.title and case.source
        assert case.heads_q % case.heads_kv == 0
        for s in case.sequences:
            assert 0 < s.q_len <= s.kv_len
            assert all(0 <= start < end < s.kv_len for start, end in s.spans)
            assert all(e0 < s1 for (_, e0), (s1, _) in zip(s.spans, s.spans[1:]))
    for what in ("has_spans", "sinks", "decode", "batched"):
        assert getattr(full, what) == getattr(small, what), what
    assert (full.page_size is None) == (small.page_size is None)
    assert full.heads_q // full.heads_kv == small.heads_q // small.heads_kv
    assert (full.mask.window_left is None) == (small.mask.window_left is None)
    assert full.mask.causal == small.mask.causal and full.mask.mm_prefix_clamp == small.mask.mm_prefix_clamp
    assert sum(s.kv_len for s in small.sequences) <= 2500, "a reduced case has to stay small"


def test_shapes_of_the_measured_workloads() -> None:
    shape = {n: (c.heads_q, c.heads_kv, c.head_dim, c.head_dim_v) for n in names() for c in [make(n)]}
    assert shape["W1"] == (32, 16, 256, 256) and shape["W3"] == (32, 8, 128, 128)
    assert shape["W6"] == (32, 4, 512, 512) and shape["W11"] == (64, 8, 192, 128)
    w1, w2, w12 = make("W1"), make("W2"), make("W12")
    (s,) = w1.sequences
    assert s.q_len == s.kv_len == 32768 and len(s.spans) == 64 and {e - b + 1 for b, e in s.spans} == {280}
    assert w1.mask == Mask.sliding_window(1024, mm_prefix_clamp=True)
    assert make("W4").mask == Mask.sliding_window(1024) and make("W3").mask == Mask.causal_()
    (s,) = w2.sequences
    assert (s.q_len, s.context) == (8192, 139264) and (w2.page_size, make("W2b").page_size) == (64, 16)
    (s,) = w12.sequences
    assert len(s.spans) == 512 and {e - b + 1 for b, e in s.spans} == {70}
    assert [len(make(n).sequences) for n in ("W7", "W7b", "W8", "W9", "W13")] == [64, 1, 32, 16, 64]


def test_page_tables_turn() -> None:
    case = Case("x", "x", "x", 8, 2, 32, 32, Mask.sliding_window(16), (Sequence(1, 512),), 16, decode=True)
    inputs = make_inputs(case, "cpu", torch.float32, touched=4096, l2=16384)
    assert len(inputs.page_tables) == 8
    last = [int(table[0, -1]) for table in inputs.page_tables]
    assert len(set(last)) == 8, "each table puts the window on other pages"
    for table in inputs.page_tables:
        assert sorted(table.flatten().tolist()) == list(range(32))
    pool = make_inputs(replace(case, sequences=(Sequence(1, 64),)), "cpu", torch.float32, touched=4096, l2=16384)
    assert pool.k.shape[0] == 8, "a short context gets a pool of pages larger than the cache"
    assert len({int(table[0, -1]) for table in pool.page_tables}) == 8


# Work model.


@pytest.mark.parametrize("name", names())
def test_work_against_brute_force(name: str) -> None:
    case = make(name, reduced=True)
    masks = [visible(case, b) for b in range(len(case.sequences))]
    pairs = sum(int(m.sum()) for m in masks)
    keys = sum(int(m.any(0).sum()) for m in masks)
    counted = work(case)
    dims = case.head_dim + case.head_dim_v
    assert counted.pairs == pairs
    assert counted.flops == 2 * dims * case.heads_q * pairs
    assert counted.kv_bytes == keys * case.heads_kv * dims * (1 if case.float8 else 2)
    assert counted.bytes == counted.kv_bytes + case.total_q * case.heads_q * dims * 2


def test_work_at_full_size() -> None:
    n, w = 16384, 1024
    assert work(make("W10")).pairs == n * (n + 1) // 2
    assert work(make("W10b")).pairs == w * (w + 1) // 2 + (n - w) * w
    assert work(make("W7b")).kv_bytes == 131072 * 8 * 256 * 2
    assert work(make("W7d")).kv_bytes == 1024 * 8 * 256 * 2
    counted = work(make("W10"))
    assert counted.tflops(1.0) == pytest.approx(counted.flops / 1e9)
    assert counted.gb_s(1.0) == pytest.approx(counted.bytes / 1e6)


# Gate.


@pytest.mark.parametrize("name", ["W1", "W2b", "W8b", "W9", "W11", "W13"])
def test_sampled_rows_equal_the_dense_oracle(name: str) -> None:
    case = make(name, reduced=True)
    inputs = inputs_of(case)
    want, _ = mmattn.reference(inputs.q, inputs.k, inputs.v, case.mask, sinks=inputs.sinks, **inputs.batch_args())
    rows = gate.sample_rows(case)
    got = gate.sampled_reference(case, inputs, inputs.q, rows, torch.float64)
    first = inputs.cu_seqlens_q.tolist()
    at = torch.tensor([first[b] + i for b, i in rows])
    torch.testing.assert_close(got, want.reshape(-1, *want.shape[-2:])[at], rtol=0, atol=1e-12)


def test_rows_stand_at_span_borders() -> None:
    case = make("W1")
    rows = gate.sample_rows(case)
    assert 64 <= len(rows) <= 400
    at = {i for _, i in rows}
    (s,) = case.sequences
    met = [span for span in s.spans if {span[0] - 1, span[0], span[1], span[1] + 1} <= at]
    assert len(met) >= 8 and s.spans[0] in met and s.spans[-1] in met
    assert {0, s.q_len - 1} <= at


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("provider", ["mmattn-torch", "sdpa-dense", "flex"])
def test_providers_pass_the_gate(name: str, provider: str) -> None:
    case = make(name, reduced=True)
    inputs = inputs_of(case)
    if provider != "mmattn-torch" and (not case.batched or (provider == "sdpa-dense" and case.sinks)):
        with pytest.raises(CannotRun):
            providers.PROVIDERS[provider].prepare(inputs)
        return
    ready = bench_run._gated(providers.PROVIDERS[provider], inputs, {}, gate.sample_rows(case, 64))
    assert 0 <= ready.first["max_error"] < (2e-3 if case.float8 else 1e-4)
    assert ready.prepared.case == case


@pytest.mark.parametrize("name", ["W1", "W1n", "W3", "W4", "W9", "W10", "W12"])
def test_flex_gets_the_block_mask_that_it_would_make(name: str) -> None:
    """On a CPU FlexAttention looks at the mask_mod only, so that the gate would not see a wrong block."""
    from torch.nn.attention.flex_attention import create_block_mask

    inputs = inputs_of(make(name, reduced=True))
    case, shape = inputs.case, inputs.case.sequences[0]
    visible = flex.mask_mod(case, flex.span_ids(case) if case.has_spans else None)
    given = flex.block_mask(inputs, visible)
    made = create_block_mask(visible, len(case.sequences), None, shape.q_len, shape.kv_len, device="cpu")
    assert torch.equal(given.to_dense(), made.to_dense().expand_as(given.to_dense()))
    # Where the last block of rows is not whole, its blocks are full for one and masked for the other.
    whole = shape.q_len // flex.BLOCK
    for mine, theirs in (
        (given.kv_num_blocks, made.kv_num_blocks),
        (given.full_kv_num_blocks, made.full_kv_num_blocks),
    ):
        assert torch.equal(mine[..., :whole], theirs[..., :whole].expand_as(mine[..., :whole]))


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 is not set")
@pytest.mark.parametrize("name", ["W8b", "W13"])
def test_interpreted_triton_passes_the_gate(name: str) -> None:
    case = make(name, reduced=True)
    bench_run._gated(providers.PROVIDERS["mmattn-triton"], inputs_of(case), {}, gate.sample_rows(case, 64))


def _wider(case: Case) -> Case:
    assert case.mask.window_left is not None
    return replace(case, mask=replace(case.mask, window_left=case.mask.window_left + 1))


def _without_clamp(case: Case) -> Case:
    return replace(case, mask=replace(case.mask, mm_prefix_clamp=False))


def _longer_spans(case: Case) -> Case:
    return replace(
        case, sequences=tuple(replace(s, spans=tuple((a, b + 1) for a, b in s.spans)) for s in case.sequences)
    )


@pytest.mark.parametrize(
    "name, fault",
    [
        ("W1", _wider),
        ("W1", _longer_spans),
        ("W1", Case.without_spans),
        ("W2", Case.causal_only),
        ("W4", _wider),
        ("W3", Case.without_spans),
        ("W8b", _wider),
        ("W11", _wider),
        ("W13", _longer_spans),
        ("long", _wider),
        ("clamp", _without_clamp),
    ],
)
def test_gate_catches_wrong_masks(name: str, fault: Any) -> None:
    if name == "clamp":  # an image longer than the window
        mask = Mask.sliding_window(8, mm_prefix_clamp=True)
        case = Case(name, name, name, 2, 1, 16, 16, mask, (Sequence(64, 64, ((4, 40),)),))
    elif name == "long":  # one key in 4096 is wrong, and bf16
        case = Case(name, name, name, 1, 1, 32, 32, Mask.sliding_window(4096), (Sequence(64, 8192),))
    else:
        case = make(name, reduced=True)
    inputs = make_inputs(case, "cpu", torch.bfloat16 if name == "long" else torch.float32)
    judge = gate.Gate(case, inputs, gate.sample_rows(case))
    wrong = fault(case)

    def outputs(as_case: Case, zero: bool) -> torch.Tensor:
        q = judge.queries(zero)
        return mmattn.attention(
            q, inputs.k, inputs.v, as_case.mask, sinks=inputs.sinks, backend="torch", **inputs.batch_args(as_case)
        )

    judge.check(outputs(case, True), zero=True)
    judge.check(outputs(case, False), zero=False)
    with pytest.raises(gate.GateError, match="see other keys"):
        judge.check(outputs(wrong, True), zero=True)


def test_gate_catches_wrong_numbers() -> None:
    case = make("W9", reduced=True)
    inputs = inputs_of(case)
    judge = gate.Gate(case, inputs, gate.sample_rows(case))
    out = mmattn.attention(inputs.q, inputs.k, inputs.v, case.mask, backend="torch", **inputs.batch_args())
    with pytest.raises(gate.GateError, match="over the budget"):
        judge.check(out * 1.01, zero=False)
    with pytest.raises(gate.GateError, match="not finite"):
        judge.check(torch.full_like(out, math.nan), zero=False)
    with pytest.raises(gate.GateError, match="shape"):
        judge.check(out[:, :1], zero=False)


# Peers.


@pytest.mark.parametrize("name", [n for n in names() if make(n).mask.causal])
def test_split_into_segments_is_exact(name: str) -> None:
    case = make(name, reduced=True)
    seen = [torch.zeros(s.q_len, s.kv_len, dtype=torch.bool) for s in case.sequences]
    covered = [torch.zeros(s.q_len, dtype=torch.int64) for s in case.sequences]
    for part in fa4.segments(case):
        k = torch.arange(part.keys)[None]
        q = torch.arange(part.keys - part.count, part.keys)[:, None]
        keep = torch.ones(part.count, part.keys, dtype=torch.bool) if part.image else k <= q
        if case.mask.window_left is not None:
            keep = keep & (q - k <= case.mask.window_left)
        rows = slice(part.first, part.first + part.count)
        seen[part.sequence][rows, : part.keys] = keep
        covered[part.sequence][rows] += 1
    for b in range(len(case.sequences)):
        assert bool((covered[b] == 1).all())
        assert torch.equal(seen[b], visible(case, b))


def test_split_gathers_and_places_rows() -> None:
    """The launches hold every row once, in segment order, with the keys of the right sequence."""
    for name in ("W1", "W2b", "W13"):
        case = make(name, reduced=True)
        inputs = inputs_of(case)
        parts = fa4.segments(case)
        rows = []
        for image in (False, True):
            mine = [p for p in parts if p.image is image]
            launch = fa4.Launch.build(inputs, mine, image)
            rows += launch.rows.tolist()
            cu = launch.args["cu_seqlens_q"].tolist()
            for n, part in enumerate(mine):
                first = int(inputs.cu_seqlens_q[part.sequence]) + part.first
                assert launch.rows[cu[n] : cu[n + 1]].tolist() == list(range(first, first + part.count))
                assert int(launch.args["seqused_k"][n]) == part.keys
                if inputs.page_tables:
                    assert torch.equal(launch.tables[0][n], inputs.page_tables[0][part.sequence])
                else:
                    assert int(launch.args["cu_seqlens_k"][n]) == int(inputs.cu_seqlens_k[part.sequence])
        assert sorted(rows) == list(range(case.total_q))


def test_split_refuses_what_it_cannot_express() -> None:
    long = (Sequence(64, 64, ((4, 40),)),)
    unclamped = Case("x", "x", "x", 2, 1, 16, 16, Mask.sliding_window(8), long)
    with pytest.raises(CannotRun, match="longer than the window"):
        fa4.segments(unclamped)
    assert fa4.segments(replace(unclamped, mask=Mask.sliding_window(8, mm_prefix_clamp=True)))
    with pytest.raises(CannotRun, match="causal"):
        fa4.segments(replace(unclamped, mask=Mask.full()))


@pytest.mark.parametrize("name", ["W2b", "W9", "W12", "W13"])
def test_row_spans(name: str) -> None:
    case = make(name, reduced=True)
    start, end = fa4.row_spans(case)
    row = 0
    for s in case.sequences:
        for q in range(s.context, s.kv_len):
            held = [(a, b) for a, b in s.spans if a <= q <= b] or [(-1, -1)]
            assert (start[row], end[row]) == held[0]
            row += 1


def test_window_in_fa4_terms() -> None:
    assert fa4._window(make("W1")) == dict(causal=True, window_size=(1023, None))
    assert fa4._window(make("W3")) == dict(causal=True, window_size=(None, None))
    assert fa4._window(make("W8")) == dict(causal=False, window_size=(None, None))
    assert fa4._window(make("W8b")) == dict(causal=False, window_size=(2047, 2047))


def test_providers_say_why_not() -> None:
    inputs = inputs_of(make("W2", reduced=True))
    for name in ("fa4-native", "fa4-mask-mod", "fa4-split", "cudnn-causal", "vllm-triton", "flex-flash"):
        with pytest.raises(CannotRun, match="GPU|paged"):
            providers.PROVIDERS[name].prepare(inputs)
    with pytest.raises(CannotRun, match="GPU"):
        providers.PROVIDERS["mmattn-cute"].prepare(inputs)


# Running.


def test_a_failing_call_costs_only_its_own_timing() -> None:
    def broken(i: int) -> None:
        raise RuntimeError("no kernel image")

    calls = []
    times = timing.interleaved({"broken": broken, "fine": calls.append}, CPU, rounds=5)
    assert isinstance(times["broken"], RuntimeError)
    fine = times["fine"]
    assert isinstance(fine, timing.Timing) and fine.samples == 5 and fine.ms >= 0
    assert calls


def test_a_provider_that_is_not_ready_in_time_is_left_out() -> None:
    calls = []
    slow = {"slow": lambda i: time.sleep(5), "fine": calls.append}
    begin = time.perf_counter()
    times = timing.interleaved(slow, CPU, rounds=2, first=0.2)
    assert time.perf_counter() - begin < 3
    assert isinstance(times["slow"], TimeoutError) and "0.2 s" in str(times["slow"])
    assert isinstance(times["fine"], timing.Timing) and calls
    with timing.patience(0.05):
        pass
    time.sleep(0.1)  # no alarm is left behind


def test_run_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    args = [
        "--device",
        "cpu",
        "--case",
        "W9",
        "W8b",
        "--provider",
        "mmattn-torch",
        "fa4-native",
        "--out",
        str(out),
        "--quick",
    ]
    result = CliRunner().invoke(bench_run.main, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(r["case"], r["provider"]) for r in rows} == {
        (c, p) for c in ("W9", "W8b") for p in ("mmattn-torch", "fa4-native")
    }
    for row in rows:
        assert {"gpu", "versions", "commit", "date", "device"} <= row.keys() and row["device"] == "cpu"
        if row["provider"] == "fa4-native":
            assert row["reason"] == "needs an NVIDIA GPU" and "ms" not in row
        else:
            assert {"ms", "eff_tflops", "mask_ms", "max_error", "spread", "first_s"} <= row.keys()
            assert ("gb_s" in row) == (row["case"] == "W8b")


def test_every_usable_backend_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(mmattn, "attention", lambda *a, backend: seen.append(backend))
    bench_run.start_backends(CPU)
    assert seen == (["triton", "torch"] if INTERPRETED else ["torch"])


def test_a_mask_that_could_not_be_made_is_not_tried_again() -> None:
    tries = []

    def make() -> None:
        tries.append(1)
        time.sleep(5)

    never = flex._giving_up(make)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="--patience"), timing.patience(0.05):
            never()
    assert len(tries) == 1


def test_host_time_is_that_of_one_call() -> None:
    seen: list[int] = []
    assert (
        900
        <= timing.host_us(lambda i: (seen.append(i), time.sleep(1e-3)), torch.device("cpu"), calls=3, bursts=2)
        < 5000
    )
    assert seen == [0, 1, 2, 0, 1, 2]


def test_run_stops_in_time(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    args = ["--device", "cpu", "--case", "W9", "W10", "--minutes", "0", "--out", str(out)]
    result = CliRunner().invoke(bench_run.main, args, catch_exceptions=False)
    assert result.exit_code == 0 and "not run: W9, W10, W10b" in result.output and out.read_text() == ""


def test_a_broken_provider_becomes_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def explode(inputs: cases.Inputs) -> Any:
        raise OSError("libcuda is\nnot here")

    broken = replace(providers.PROVIDERS["sdpa-dense"], prepare=explode)
    monkeypatch.setitem(providers.PROVIDERS, "sdpa-dense", broken)
    out = tmp_path / "rows.jsonl"
    args = ["--device", "cpu", "--case", "W9", "--provider", "sdpa-dense", "mmattn-torch", "--out", str(out)]
    assert CliRunner().invoke(bench_run.main, args, catch_exceptions=False).exit_code == 0
    rows = load(out)
    assert rows["W9", "sdpa-dense"]["reason"] == "OSError: libcuda is not here"
    assert "ms" in rows["W9", "mmattn-torch"]


def test_unknown_names_are_refused() -> None:
    for args, word in ((["--case", "W99"], "W99"), (["--provider", "nobody"], "nobody"), (["--sweep"], "GPU")):
        result = CliRunner().invoke(bench_run.main, ["--device", "cpu", *args])
        assert result.exit_code == 2 and word in result.output


# Comparing and drawing, on made-up rows.


def made_up(slower: float = 1.0) -> list[dict[str, Any]]:
    about = {
        "gpu": "Test GPU",
        "versions": {"torch": "2.11"},
        "commit": "0123456789ab",
        "date": "2026-01-01T00:00:00+00:00",
    }
    rows: list[dict[str, Any]] = [{"case": "peak", "provider": "copy", "ms": 0.5, "gb_s": 4000.0, "spread": 0.01}]
    for n, case in enumerate(names()):
        for provider, factor in (
            ("mmattn", slower),
            ("mmattn-triton", 1.4),
            ("fa4-native", 0.95),
            ("fa4-mask-mod", 30),
            ("flex", 2.2),
        ):
            row = {
                "case": case,
                "provider": provider,
                "ms": (n + 1) * factor,
                "eff_tflops": 500 / factor,
                "spread": 0.01,
                "mask": "case",
            }
            if provider == "fa4-native":
                row["mask"] = "without images"
            rows.append(row)
        rows.append({"case": case, "provider": "vllm-triton", "reason": "vllm is not installed"})
    for length in cases.SWEEP_LENGTHS:
        for provider, slope in (("mmattn", 1.0), ("flex", 1.5), ("fa4-mask-mod", length / 4096)):
            rows.append(
                {
                    "case": f"S{length}",
                    "provider": provider,
                    "ms": length * slope * 1e-4,
                    "mask_ms": 0.01 * slope,
                    "spread": 0.01,
                }
            )
    return [{**row, **about} for row in rows]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_compare(tmp_path: Path) -> None:
    old, new = written(tmp_path / "old.jsonl", made_up()), written(tmp_path / "new.jsonl", made_up(1.01))
    assert CliRunner().invoke(compare_main, [str(old), str(new)]).exit_code == 0
    slow = CliRunner().invoke(compare_main, [str(old), str(written(tmp_path / "slow.jsonl", made_up(1.1)))])
    assert slow.exit_code == 1 and "slower" in slow.output
    lost = [
        r if r["provider"] != "mmattn" else {k: v for k, v in r.items() if k != "ms"} | {"reason": "gone"}
        for r in made_up()
    ]
    gone = CliRunner().invoke(compare_main, [str(old), str(written(tmp_path / "lost.jsonl", lost))])
    assert gone.exit_code == 1 and "lost" in gone.output
    other = [r | {"gpu": "Another GPU"} for r in made_up()]
    assert CliRunner().invoke(compare_main, [str(old), str(written(tmp_path / "other.jsonl", other))]).exit_code == 2
    (tmp_path / "broken.jsonl").write_text("{\n")
    broken = CliRunner().invoke(compare_main, [str(old), str(tmp_path / "broken.jsonl")])
    assert broken.exit_code == 2 and "broken.jsonl:1" in broken.output


def test_verdicts() -> None:
    def row(ms: float, spread: float = 0.0) -> dict[str, float]:
        return {"ms": ms, "spread": spread}

    assert verdict(row(1), row(1.019)) == "same" and verdict(row(1), row(1.021)) == "slower"
    assert verdict(row(1, 0.05), row(1.07, 0.03)) == "same" and verdict(row(1), row(0.9)) == "faster"
    assert verdict(row(1), {"reason": "x"}) == "lost" and verdict(row(1), None) == "none"
    assert (
        verdict(None, row(1)) == "new"
        and verdict({"reason": "x"}, row(1)) == "new"
        and verdict(None, {"reason": "x"}) == "none"
    )


def test_plots(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", made_up())
    result = CliRunner().invoke(plot.main, [str(rows)], catch_exceptions=False)
    assert result.exit_code == 0
    for name in ("speedups.png", "context.png", "mask_build.png"):
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG") and 5_000 < len(data) < 300_000
    ratios = plot.speedups(load(rows))
    assert ratios["W1"] == pytest.approx({"fa4-mask-mod": 30, "flex": 2.2}), "a floor without images is no peer"
    only = written(tmp_path / "only.jsonl", [r for r in made_up() if not r["case"].startswith("S")])
    (tmp_path / "out").mkdir()
    result = CliRunner().invoke(plot.main, [str(only), "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert "context.png: no rows" in result.output and not (tmp_path / "out" / "context.png").exists()


def test_targets(tmp_path: Path) -> None:
    rows = load(written(tmp_path / "rows.jsonl", made_up()))
    by_name = {t.what: t for t in targets.TARGETS}
    flex = by_name["W3: time of flex / time of mmattn-triton"]
    assert flex.value(rows) == pytest.approx(2.2 / 1.4) and flex.met(2.2 / 1.4) and not flex.met(1.0)
    wrapper = by_name["W10: time of mmattn / time of fa4-native"]
    assert wrapper.value(rows) == pytest.approx(1 / 0.95) and not wrapper.met(1 / 0.95)
    assert by_name["W1: eff of mmattn-cute / eff of FA4 native"].value(rows) is None
    result = CliRunner().invoke(targets.main, [str(tmp_path / "rows.jsonl")], catch_exceptions=False)
    assert all(word in result.output for word in ("met", "missed", "not measured"))
