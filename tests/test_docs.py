"""The code in the documents runs, and their links lead somewhere.

`python` blocks run from top to bottom in one namespace per document, `pycon` blocks are doctests in the same namespace,
and a `python gpu` block stands alone.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(python|pycon)( gpu)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


class Block(NamedTuple):
    language: str
    gpu: bool
    line: int
    """Lines of the document before the code."""
    code: str


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    return [Block(m[1], bool(m[2]), text[: m.start(3)].count("\n"), m[3]) for m in _FENCE.finditer(text)]


def run(document: Path, block: Block, namespace: dict[str, Any]) -> None:
    if block.language == "python":
        # Leading newlines make a traceback point into the document.
        exec(compile("\n" * block.line + block.code, str(document), "exec"), namespace)
        return
    test = doctest.DocTestParser().get_doctest(block.code, namespace, document.name, str(document), block.line)
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False)
    namespace.update(test.globs)
    assert not report, "".join(report)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_code_runs(document: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "document"}
    for block in blocks(document):
        if not block.gpu:
            run(document, block, namespace)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if any(b.gpu for b in blocks(d))], ids=lambda path: path.name
)
def test_gpu_code_runs(document: Path) -> None:
    for block in blocks(document):
        if block.gpu:
            run(document, block, {"__name__": "document"})


def test_the_documents_hold_code() -> None:
    """A change of the fences must not empty the tests above."""
    by_name = {document.name: blocks(document) for document in DOCUMENTS}
    assert {block.language for block in by_name["README.md"]} == {"python", "pycon"}
    assert by_name["semantics.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_exist(document: Path) -> None:
    links = [link for link in _LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing, f"{document.name} links to {missing}"
