"""The commands, as a user runs them, at small sizes."""

import os
import subprocess
import sys

import pytest
import torch

import mmattn
from mmattn.faults import FAULTS

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner

from mmattn.cli import demo as demo_module
from mmattn.cli import niah as niah_module
from mmattn.cli.commands import cli
from mmattn.cli.haystack import Haystack, Planted

TORCH = ["--backend", "torch", "--device", "cpu"]
SMALL = ["niah", *TORCH, "--context", "300", "--window", "24"]


def run(*args):
    return CliRunner().invoke(cli, args)


def test_help_names_every_command_and_option():
    assert all(name in run("--help").output for name in ("demo", "niah", "info"))
    text = run("niah", "--help").output
    assert all(
        option in text for option in ("--context", "--chunk", "--page-size", "--fault", "--list-faults", "--backend")
    )
    assert mmattn.__version__ in run("--version").output


def test_niah_finds_every_needle():
    result = run("niah", *TORCH)
    assert result.exit_code == 0, result.output
    assert "every needle was retrieved and every decoy kept out" in result.output
    for text in ("one call", "chunks of 384", "chunks of 250", "chunks of 96", "Gemma 4 sliding", "Gemma 3 global"):
        assert text in result.output


@pytest.mark.parametrize("fault", FAULTS)
def test_niah_notices_every_fault(fault):
    result = run(*SMALL, "--chunk", "0", "--chunk", "90", "--fault", fault)
    assert result.exit_code == 1, result.output
    summary = result.output.splitlines()[-1]
    assert summary.startswith(f"with the fault {fault}: ")
    lost = int(summary.split(": ")[1].split(" needles lost")[0])
    assert lost > 0


def test_niah_with_other_shapes_pages_and_dtype():
    result = run(
        *SMALL, "--chunk", "64", "--chunk", "1000", "--page-size", "7",
        "--heads", "6", "--kv-heads", "2", "--head-dim", "40", "--dtype", "bfloat16", "--seed", "5",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "heads 6/2 x 40, bfloat16 on cpu, pages of 7" in result.output
    assert "chunks of 64" in result.output and "chunks of 300" in result.output and "one call" not in result.output


@pytest.mark.parametrize("how", ["nan", "wrong head"])
def test_niah_notices_a_broken_backend(monkeypatch, how):
    right = mmattn.attention

    def broken(q, k, v, plan, **kw):
        out = right(q, k, v, plan, **kw)
        if how == "wrong head":
            return out.roll(1, dims=1)
        out[0, 0, 0] = float("nan")
        return out

    monkeypatch.setattr(mmattn, "attention", broken)
    result = run(*SMALL, "--chunk", "0")
    assert result.exit_code == 1
    assert ("not finite" if how == "nan" else "needles lost") in result.output


def test_niah_lists_the_faults():
    result = run("niah", "--list-faults")
    assert result.exit_code == 0
    assert all(name in result.output for name in FAULTS)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["niah", "--context", "200", "--device", "cpu"], "needs a context of at least"),
        (["niah", "--head-dim", "4", "--device", "cpu"], "need a head dim of at least"),
        (["niah", "--kv-heads", "3", "--device", "cpu"], "must divide 4 query heads"),
        (["niah", "--fault", "nothing"], "is none of window-dropped"),
        (["niah", "--device", "quantum"], "torch cannot use the device 'quantum'"),
        (["niah", "--device", "meta"], "torch cannot use the device 'meta'"),
        (["niah", "--backend", "flash"], "Invalid value for '--backend'"),
    ],
)
def test_niah_says_what_is_wrong_with_an_option(args, text):
    result = run(*args)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_a_backend_that_cannot_run_is_an_error_with_its_reasons():
    result = run("niah", "--backend", "cute", "--device", "cpu", "--context", "300", "--window", "24", "--chunk", "0")
    assert result.exit_code == 1
    assert "not run: cute: tensors are on cpu" in result.output
    assert "cute could run none of this" in result.output


def test_the_haystack_asks_on_both_sides_of_every_border():
    """For each kind of layer both answers occur, in one call and where chunks split images."""
    hay = Haystack.build(300, 24, [90])
    assert all(start < end < 300 for start, end in hay.spans)
    assert any(start // 90 != end // 90 for start, end in hay.spans)
    for layer in niah_module.layer_kinds(24):
        spans = hay.spans if layer.spans else []
        answers = {yes for row in hay.questions for yes in hay.expected(layer.mask, spans, row, 300).values()}
        assert answers == {True, False}
    planted = Planted(hay, 4, 2, 32, torch.device("cpu"), torch.float32, 0)
    assert torch.equal(
        planted.queries(0, 300)[planted.rows], torch.cat([planted.queries(r, r + 1) for r in planted.rows])
    )


def test_demo_agrees_and_saves_pictures(tmp_path):
    pytest.importorskip("sklearn")
    image = pytest.importorskip("PIL.Image")
    result = run(
        "demo",
        "--no-model",
        "--backend",
        "torch",
        "--device",
        "cpu",
        "--image-tokens",
        "70",
        "--window",
        "300",
        "--out",
        str(tmp_path),
    )
    assert result.exit_code == 0, result.output
    assert result.output.count(" yes ") == 4 and "NO" not in result.output
    assert "china.jpg" in result.output and "flower.jpg" in result.output
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["gemma-3-global.png", "gemma-3-sliding.png", "gemma-4-global.png", "gemma-4-sliding.png"]
    for path in tmp_path.iterdir():
        with image.open(path) as picture:
            assert min(picture.size) > 400


def test_demo_fails_when_a_backend_is_wrong(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    right = mmattn.attention

    def broken(q, k, v, plan, **kw):
        result = right(q, k, v, plan, **kw)
        if isinstance(result, tuple):
            result[0][0, -1, 0] += 1e-3
        return result

    one = demo_module.layers(1024)[2:3]
    monkeypatch.setattr(mmattn, "attention", broken)
    monkeypatch.setattr(demo_module, "layers", lambda window: one)
    result = run("demo", "--no-model", *TORCH, "--image-tokens", "70", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "1 results are farther from the oracle than their budget" in result.output


def model_module():
    """The second part of the demo, in a test that needs what it needs."""
    pytest.importorskip("sklearn")
    pytest.importorskip("PIL")
    pytest.importorskip("transformers")
    from mmattn.cli import model

    return model


MODEL = ["demo", "--no-layers", "--device", "cpu", "--image-tokens", "70", "--window", "300"]


def test_demo_runs_a_model_with_eager_attention_and_with_mmattn():
    model_module()
    result = run(*MODEL)
    assert result.exit_code == 0, result.output
    assert "china.jpg 60 tokens" in result.output and "fits into the window" not in result.output
    rows = {line.split()[1]: line for line in result.output.splitlines() if line.startswith("\u2502")}
    assert "16 of 16" in rows["mmattn"] and " yes " in rows["mmattn"]
    sizes = {name: line.split("\u2502")[-2].split() for name, line in rows.items()}
    # 952 tokens: two dense float32 masks are 6.9 MiB; two intervals of two int32 are 15 KiB, plus scratch.
    assert sizes["eager"][1] == "MiB" and 6.9 < float(sizes["eager"][0]) < 20
    assert sizes["mmattn"][1] == "KiB" and 15 < float(sizes["mmattn"][0]) < 300


def test_demo_fails_when_the_model_gets_a_wrong_mask(monkeypatch):
    model = model_module()
    from mmattn.hf import intervals, masks

    right = masks._lower

    def one_key_short(*args):
        mask = right(*args)
        rows = mask.rows.clone()
        rows[..., 0] += (rows[..., 1] - rows[..., 0] > 1).int()
        return intervals.IntervalMask(rows, mask.shape[3])

    monkeypatch.setattr(masks, "_lower", one_key_short)
    monkeypatch.setattr(model, "NEW_TOKENS", 2)
    result = run(*MODEL, "--backend", "torch")
    assert result.exit_code == 1, result.output
    assert "mmattn on torch" in result.output and " NO " in result.output
    assert "does not give the same with mmattn as with eager" in result.output


def test_a_model_that_a_backend_cannot_run_is_an_error_with_its_reasons():
    model_module()
    result = run(*MODEL, "--backend", "cute")
    assert result.exit_code == 1
    assert "does not run on cute" in result.output and "not run: cute: dtype float32" in result.output


def test_tokens_and_logits_are_compared_up_to_the_first_that_differs():
    model = model_module()
    steps = torch.zeros(model.NEW_TOKENS, 4)
    eager = model.Answer(torch.zeros(5, 4), steps, [1] * model.NEW_TOKENS, 0, 0.0, 0.0)

    def other(steps, tokens):
        return model.Answer(torch.zeros(5, 4), steps, tokens, 0, 0.0, 0.0).agreement(eager)

    assert other(steps, eager.tokens) == (0.0, model.NEW_TOKENS)
    later = steps.clone()
    later[4:] = 9.0
    assert other(later, [1, 1, 1, 2, *eager.tokens[4:]]) == (0.0, 3)
    assert other(later, eager.tokens)[0] == 9.0
    later[3, 2] = float("nan")
    assert other(later, [1, 1, 1, 2, *eager.tokens[4:]]) == (float("inf"), 3)


def test_mask_memory_counts_storages_until_they_are_freed():
    pytest.importorskip("transformers")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    from mmattn.cli.mask_memory import Allocations, mask_allocations

    counts, given = Allocations(), torch.zeros(1000)
    with counts:
        kept = torch.zeros(50, dtype=torch.int32)
        scratch = given + 1
        views = (given[:10], scratch.view(10, 100).T)
    assert (counts.now, counts.peak) == (200 + 4000, 200 + 4000)
    del scratch
    assert counts.now == 4200  # a view is left
    del views
    assert counts.now == 200 and counts.peak == 4200
    del kept
    assert counts.now == 0

    tiles, eager = mmattn.Plan.tiles, ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    plan = mmattn.plan(mmattn.Mask.causal_(), q=torch.empty(1, 64, 1, 8), k=torch.empty(1, 64, 1, 8))
    with mask_allocations("eager") as counts:
        table = plan.tiles(16, 1, 16)
        mask = ALL_MASK_ATTENTION_FUNCTIONS["eager"](batch_size=1, q_length=64, kv_length=64)
        sizes = [x.nbytes for x in (table.ranges, table.index, table.starts, mask)]
        assert counts.now == sum(sizes) and counts.peak > counts.now
    assert mmattn.Plan.tiles is tiles and ALL_MASK_ATTENTION_FUNCTIONS["eager"] is eager


@pytest.mark.parametrize("layers", [True, False])
def test_without_transformers_the_demo_says_what_to_install(monkeypatch, layers):
    pytest.importorskip("sklearn")
    pytest.importorskip("PIL")
    monkeypatch.delitem(sys.modules, "mmattn.cli.model", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    shown = []

    def show_layers(console, device, dtype, window, image_tokens, full_heads, folder, ran):
        shown.append(ran.usable({"torch": []}, "a layer"))
        return True

    monkeypatch.setattr(demo_module, "show_layers", show_layers)
    result = run("demo", "--device", "cpu", *([] if layers else ["--no-layers"]))
    assert shown == ([["torch"]] if layers else [])
    assert result.exit_code == (0 if layers else 1)
    assert "needs transformers 5.10 or newer: pip install 'mmattn[demo,hf]'" in result.output


def test_demo_with_both_parts_off_is_refused():
    pytest.importorskip("sklearn")
    pytest.importorskip("PIL")
    result = run("demo", "--no-layers", "--no-model")
    assert result.exit_code == 2
    assert "leave nothing to run" in result.output


def test_info_is_plain_text_with_reasons():
    result = run("info")
    assert result.exit_code == 0, result.output
    for text in (
        f"mmattn {mmattn.__version__}",
        f"torch {torch.__version__.split('+')[0]}",
        "flash-attn-4",
        "cpu: ",
        "backends on cpu",
    ):
        assert text in result.output
    assert "\x1b" not in result.output and "\u2502" not in result.output
    assert "torch: can run this call" in result.output
    assert "Gemma 4 sliding, inputs require grad" in result.output


def test_python_dash_m(tmp_path):
    env = {**os.environ, "MMATTN_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mmattn", "info"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "MMATTN_DEBUG=1" in done.stdout


def test_without_click_a_message_says_what_to_install(tmp_path):
    code = (
        "import sys, importlib.util as u, mmattn.__main__ as m\n"
        "m.find_spec = lambda name: None if name == 'click' else u.find_spec(name)\n"
        "m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "python -m mmattn needs click: pip install 'mmattn[demo]'"
