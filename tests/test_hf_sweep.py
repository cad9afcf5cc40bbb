"""The table of all families: complete, without a wrong or crashing one, and repeated for some families."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers

from . import hf_sweep, hf_table


def test_the_table_has_every_family_and_none_is_wrong() -> None:
    version, rows = hf_table.read()
    assert {row["verdict"] for row in rows} <= {"equal", "refused", "unused", "by itself"}
    for row in rows:
        runs = row.get("runs", {})
        assert {run["verdict"] for run in runs.values()} <= {"equal", "refused", "unused", "by itself"}, row
        assert all(run["why"] for run in runs.values() if run["verdict"] in ("refused", "by itself")), row
        assert row["verdict"] != "by itself" or row["why"]
    if version == transformers.__version__:
        assert [row["family"] for row in rows] == hf_sweep.families()
    assert sum(row["verdict"] != "by itself" for row in rows) >= 300


def test_some_families_again(tmp_path: Path) -> None:
    """`python -m tests.hf_sweep` runs all of them."""
    out = tmp_path / "table.jsonl"
    command = [sys.executable, "-m", "tests.hf_sweep", "--fast", "--out", str(out), "--seconds", "100"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    version, rows = hf_table.read(out)
    known, table = hf_table.read()
    if version != known:
        pytest.skip(f"the table is of transformers {known}; nothing is wrong with {version}")
    verdicts = {row["family"]: row["verdict"] for row in table}
    assert {row["family"]: row["verdict"] for row in rows} == {family: verdicts[family] for family in hf_table.FAST}


def test_a_wrong_family_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is worth something: a window of one key less shows, and so does an exception."""
    from mmattn.hf import masks

    real = masks._lower

    def short(*args):  # type: ignore[no-untyped-def]
        mask = real(*args)
        rows = mask.rows.clone()
        rows[..., 0] += (rows[..., 1] - rows[..., 0] > 1).int()
        return type(mask)(rows, mask.shape[3], mask.about, dtype=mask.dtype)

    def crash(*args):  # type: ignore[no-untyped-def]
        raise AssertionError("broken")

    for broken, verdict in ((short, "WRONG"), (crash, "CRASH"), (real, "equal")):
        monkeypatch.setattr(masks, "_lower", broken)
        row = hf_sweep.examine("llama")
        assert row["verdict"] == verdict, json.dumps(row)
