"""The examples, as a user runs them, for a few steps."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("PIL")

from click.testing import CliRunner

FINETUNE = Path(__file__).parent.parent / "examples" / "finetune_gemma3_images.py"


def finetune(*args: str) -> Any:
    return CliRunner().invoke(runpy.run_path(str(FINETUNE))["main"], [*args, "--device", "cpu"])


def test_finetuning_lowers_the_loss() -> None:
    result = finetune("--steps", "12")
    assert result.exit_code == 0, result.output
    assert "12/12" in result.output and result.output.rstrip().endswith("it went down")


def test_finetuning_tells_when_the_loss_does_not_go_down() -> None:
    result = finetune("--steps", "6", "--lr", "30")
    assert result.exit_code == 1 and "it did not go down; try more --steps or another --lr" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--model", "x"], "--model needs a GPU"), (["--steps", "1"], "--steps"), (["--lr", "0"], "--lr")],
)
def test_finetuning_refuses(args: list[str], message: str) -> None:
    result = finetune(*args)
    assert result.exit_code == 2 and message in result.output


def test_a_missing_extra_is_named() -> None:
    code = f"import sys, runpy; sys.modules['PIL'] = None; runpy.run_path({str(FINETUNE)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1 and result.stderr == "this example needs PIL: pip install 'mmattn[hf,demo]'\n"
