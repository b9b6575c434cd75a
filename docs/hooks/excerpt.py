"""Hook: excerpts of the source, by the name of what they show, so that a page cannot go stale.

    --excerpt-- v0_1_single_request/kv_cache.py KVCache.attend
    --excerpt-- v0_1_single_request/generate.py
    --excerpt-- v0_1_single_request/kv_cache.py KVCache.attend | keys = | return

becomes a fence with that symbol's source (or, without a symbol, the whole file), titled with path and lines, and a link
to the page that shows the whole file, or its diff, if there is one. A symbol is a function, a class or an assigned
name, dotted where it stands inside another; in C it is a function. A file or symbol that is lost ends the build.
Comments above a symbol are left out.

The third form is a piece of a symbol, for a page that explains a function a few lines at a time: from the one line that
has the first text to the next line that has the second (one text alone is one line). It stands without the link.
On a Chinese page title and link are Chinese.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

from chinese import is_chinese
from sources import SourceError, fence, language_of, place_of, read_source, relative_link, replace_directives

from tools.milestones import LedgerError, Milestone, load_ledger

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """mkdocs calls this with every page's text, before it is read as Markdown."""
    from mkdocs.exceptions import PluginError  # here, so that the rest can be tested without mkdocs

    try:
        return expand(markdown, page.file.src_uri, Path(config.config_file_path).parent)
    except (SourceError, LedgerError) as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def expand(markdown: str, page: str, root: Path) -> str:
    """The text of a page with its excerpts in place; `page` is its source file, relative to docs/."""

    def replacement(arguments: str) -> str:
        what, *texts = arguments.split(" | ")
        match what.split():
            case [path] if not texts:
                return excerpt(root, path, "", page, load_ledger(root))
            case [path, symbol] if not texts:
                return excerpt(root, path, symbol, page, load_ledger(root))
            case [path, symbol] if len(texts) <= 2:
                return piece(root, path, symbol, texts, page)
        raise SourceError(
            "an excerpt is `--excerpt-- path symbol` or `--excerpt-- path symbol | first line | last line`, "
            f"not `--excerpt-- {arguments}`"
        )

    return replace_directives(markdown, "excerpt", replacement)


def excerpt(root: Path, path: str, symbol: str, page: str, milestones: Sequence[Milestone]) -> str:
    """The fence for one symbol of the file at `path` (relative to `root`), and the link below it."""
    source = read_source(root, path)
    in_chinese = is_chinese(page)
    if symbol:
        first, last, text = cut(source, symbol, path)
        block = fence(text, language_of(path), f"{path}{_lines(first, last, in_chinese)}")
    else:
        block = fence(source, language_of(path), path)
    place = place_of(root, path, milestones)
    if place is None:
        return block
    if in_chinese:
        shown = f"{path} 全文" if place.whole else f"{path} 的改动"
    else:
        shown = f"{path} in full" if place.whole else f"what changed in {path}"
    return f"{block}\n[{shown}]({relative_link(place.target, page)}){{ .excerpt-link }}\n"


def piece(root: Path, path: str, symbol: str, texts: Sequence[str], page: str) -> str:
    """The fence for the lines of a symbol from the one that has `texts[0]` to the next one that has `texts[1]`.

    Raises:
        SourceError: a text is not there, or the first one is in several lines: the page has to say which it means.
    """
    start, _, text = cut(read_source(root, path), symbol, path)
    lines = text.split("\n")
    begins = [i for i, line in enumerate(lines) if texts[0] in line]
    if len(begins) != 1:
        raise SourceError(f"{path} {symbol}: {texts[0]!r} is in {len(begins)} lines: a piece begins in exactly one")
    end = next((i for i in range(begins[0], len(lines)) if texts[-1] in lines[i]), None)
    if end is None:
        raise SourceError(f"{path} {symbol}: {texts[-1]!r} is in no line from line {start + begins[0]} on")
    title = f"{path}{_lines(start + begins[0], start + end, is_chinese(page))}"
    return fence(dedent("\n".join(lines[begins[0] : end + 1])), language_of(path), title)


def _lines(first: int, last: int, in_chinese: bool) -> str:
    """What the title says of the lines, behind the path."""
    if in_chinese:
        return f"，第 {first} 行" if first == last else f"，第 {first} 至 {last} 行"
    return f", line {first}" if first == last else f", lines {first} to {last}"


def cut(source: str, symbol: str, path: str) -> tuple[int, int, str]:
    """First line, last line (from 1) and text of a symbol, decorators included and indentation removed.

    Raises:
        SourceError: the file is neither Python nor C, or the symbol is not there exactly once.
    """
    if Path(path).suffix in (".c", ".h"):
        return _cut_c(source, symbol, path)
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise SourceError(f"{path} is no Python: {error}") from error
    node: ast.stmt | None = None
    for name in symbol.split("."):
        found = list(definitions(body, name))
        if len(found) != 1:
            where = ", ".join(str(node.lineno) for node in found)
            count = f"is there {len(found)} times, in lines {where}" if found else "is not there"
            raise SourceError(f"{path} {symbol}: {name} {count}")
        node = found[0]
        body = getattr(node, "body", [])
    assert node is not None  # "".split(".") has one element
    # A node begins at its `def`; its decorators are above.
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    last = node.end_lineno or node.lineno
    # Only "\n" ends a line for the parser; `splitlines` would also split at a form feed.
    lines = source.split("\n")[first - 1 : last]
    # Text inside a long string may stand further left than the symbol does: that line stays as it is.
    width = node.col_offset
    return first, last, "\n".join(line[width:] if not line[:width].strip() else line for line in lines)


def _cut_c(source: str, name: str, path: str) -> tuple[int, int, str]:
    """The same of a function in C: from the line with its name, which begins at the margin, to the brace there."""
    lines = source.split("\n")
    found = [i for i, line in enumerate(lines) if re.match(rf"[A-Za-z][^(]*\b{re.escape(name)}\(", line)]
    if len(found) != 1:
        raise SourceError(f"{path} {name}: the function is there {len(found)} times")
    last = next((i for i in range(found[0], len(lines)) if lines[i] == "}"), found[0])
    return found[0] + 1, last + 1, "\n".join(lines[found[0] : last + 1])


def definitions(body: Sequence[ast.AST], name: str) -> Iterator[ast.stmt]:
    """Every statement that binds `name` in this scope, inside `if`, `try` and `with` as well."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name == name:
                    yield node
            case ast.Assign(targets=targets):
                if any(name in names(target) for target in targets):
                    yield node
            case ast.AnnAssign(target=target):
                if name in names(target):
                    yield node
            case ast.If() | ast.Try() | ast.With() | ast.ExceptHandler():
                for part in ("body", "handlers", "orelse", "finalbody"):
                    yield from definitions(getattr(node, part, []), name)


def names(target: ast.expr) -> set[str]:
    """The names that an assignment to `target` binds: not `self` in `self.x`, not `rows` in `rows[0]`."""
    match target:
        case ast.Name(id=name):
            return {name}
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return set().union(*(names(part) for part in parts))
    return set()
