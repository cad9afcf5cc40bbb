"""`docs/models.jsonl`, the verdicts of `tests.hf_sweep`, and what `docs/models.md` says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent.parent / "docs" / "models.jsonl"
VERDICTS = ("equal", "refused", "unused", "by itself", "WRONG", "CRASH")
FAST = (
    "llama", "gemma3", "gemma4", "gpt_oss", "qwen2_vl", "idefics3", "mllama", "whisper", "bart", "bert", "t5", "git",
    "bigbird_pegasus", "nllb_moe", "deepseek_v4", "t5gemma2", "bridgetower", "falcon", "zamba", "jamba", "clip", "doge",
)  # fmt: skip
"""Families of the run in CI: some of every kind, and those that once went wrong."""

_REASONS = (
    (r"picks its attention from a table of its own", "picks its attention from a table of its own"),
    (r"(aten\.\w+)\S* calculates with the attention mask", r"calculates with its mask (`\1`)"),
    (r"(aten\.\w+)\S* writes into the attention mask", r"writes into its mask (`\1`)"),
    (r"position_bias is given", "relative position bias"),
    (r"sinks is given", "sinks of another form"),
    (r"mask differs between heads", "a mask or bias for each head"),
    (r"mask holds biases", "biases in the mask"),
    (r"sees \d+ separate key ranges", "several key ranges in a row"),
    (r"is_decoder=False", "no mask, and eager and sdpa of transformers differ then"),
    (r"dropout=", "dropout"),
)


def read(path: Path = TABLE) -> tuple[str, list[dict[str, Any]]]:
    """The version of transformers and the rows."""
    head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return head["transformers"], rows


def write(version: str, rows: Iterable[dict[str, Any]], path: Path = TABLE) -> None:
    """Sorted, and without what changes from run to run."""
    kept = []
    for row in sorted(rows, key=lambda row: row["family"]):
        row = {name: value for name, value in row.items() if name != "seconds"}
        if "runs" in row:
            row["runs"] = {
                kind: {name: value for name, value in run.items() if name not in ("error", "calls")}
                for kind, run in row["runs"].items()
            }
        kept.append(row)
    lines = [json.dumps(x) for x in ({"transformers": version}, *kept)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def update(version: str, rows: list[dict[str, Any]]) -> None:
    """Replaces the rows of some families; the table must be of the same version."""
    held, old = read()
    if held != version:
        raise ValueError(f"the table is of transformers {held}, this is {version}: run all families")
    new = {row["family"] for row in rows}
    write(version, [*rows, *(row for row in old if row["family"] not in new)])


def short(reason: str) -> str:
    """A refusal in a few words."""
    for pattern, words in _REASONS:
        found = re.search(pattern, reason)
        if found:
            return found.expand(words)
    return reason.split(": ", 1)[-1][:120]


def document() -> str:
    """The section on all families."""
    version, rows = read()
    of = {verdict: [row for row in rows if row["verdict"] == verdict] for verdict in VERDICTS}
    return "\n\n".join(
        [
            "## Every family of transformers",
            f"`python -m tests.hf_sweep` builds each of the {len(rows)} families of transformers {version} that ask for an attention function or a "
            "mask, tiny and with random weights, and compares padded prefill longer than the window and generation with eager attention; "
            "images, sound and video too where a model takes them. `docs/models.jsonl` has every run of it. None is wrong, none crashes: "
            f"{len(of['equal'])} are equal, {len(of['refused'])} refuse at least one kind of input with the reason, "
            f"{len(of['unused'])} keep an attention of their own (and are equal), {len(of['by itself'])} could not be tested.",
            f"**Equal**: {_names(of['equal'])}.",
            f"**Keep their own attention**: {_names(of['unused'])}." if of["unused"] else "",
            '**Refused**, and what `register(fallback="sdpa")` makes of it:',
            _refused(of["refused"]),
            "**Not tested**, because the model does not run with eager attention either, on this machine or with these inputs:",
            "\n".join(f"* `{row['family']}`: {_plain(row['why'][0])}" for row in of["by itself"]),
        ]
    ).replace("\n\n\n\n", "\n\n")


def _names(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"`{row['family']}`" for row in rows) or "none"


def _refused(rows: list[dict[str, Any]]) -> str:
    lines = ["| family | refused | why | with the fallback | equal |", "|---|---|---|---|---|"]
    for row in rows:
        refused = {kind: run for kind, run in row["runs"].items() if run["verdict"] == "refused"}
        why = dict.fromkeys(short(run["why"]) for run in refused.values())
        fallback = dict.fromkeys(run.get("fallback", "refused too") for run in refused.values())
        equal = [kind for kind, run in row["runs"].items() if run["verdict"] == "equal"]
        lines.append(
            f"| `{row['family']}` | {', '.join(refused)} | {'; '.join(why)} | {', '.join(fallback)} | {', '.join(equal)} |"
        )
    return "\n".join(lines)


def _plain(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"<[^>]*>", "...", text).replace("|", "/")
    return text if len(text) <= 160 else text[:157].rstrip() + "..."
