"""Hook: a page of changes for every milestone, made from the ledger and the tree while the site is built.

    v0.1    "Source of v0.1": every file whole
    v0.2 …  "v0.1 → v0.2": the diff of each changed file, each new file whole, the others by name

Nothing is written to docs/. The pages stand in the navigation where `mkdocs.yml` has the empty section "Changes", and
are left out of the search, which would find every line twice. Whether the ledger is true is not asked here: that is
`python -m tools.ledger check`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from sources import (
    SourceError,
    anchor_of,
    changes_page,
    fence,
    indent,
    language_of,
    lesson_page,
    read_source,
    relative_link,
    version_of,
)

from tools.milestones import LedgerError, Milestone, load_ledger, order_faults

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.livereload import LiveReloadServer
    from mkdocs.structure.files import Files

SECTION = "Changes"
CONTEXT = 3  # unchanged lines around a change, as `diff -u` has them
DEFINITION = re.compile(r"\s*(?:async def|def|class)\s")


@dataclass(frozen=True, slots=True)
class FileChange:
    """What happened to one file.

    `body` is what its section shows, in Markdown, or empty if it has none; `summary` is the line that folds it, without
    the file's name: Markdown would read `__init__` as emphasis.
    """

    path: str
    status: str
    added: int
    removed: int
    body: str = ""
    summary: str = ""


def on_config(config: "MkDocsConfig") -> None:
    """Fill the section of the navigation."""
    milestones = _ledger(config)
    pages: list[object] = [{title_of(milestone): changes_page(milestone)} for milestone in milestones]
    sections = [item for item in config.nav or [] if isinstance(item, dict) and SECTION in item]
    if len(sections) != 1:
        raise _plugin_error(f"the navigation in mkdocs.yml needs one section {SECTION!r}: `- {SECTION}: []`")
    sections[0][SECTION] = pages


def on_files(files: "Files", config: "MkDocsConfig") -> None:
    """Add the pages to those of docs/."""
    from mkdocs.structure.files import File  # here, so that the rest can be tested without mkdocs

    root = Path(config.config_file_path).parent
    milestones = _ledger(config)
    by_name = {milestone.name: milestone for milestone in milestones}
    for milestone in milestones:
        page = changes_page(milestone)
        if files.get_file_from_path(page) is not None:
            raise _plugin_error(f"docs/{page} is in the way of the generated page: remove it")
        try:
            content = render(root, milestone, by_name.get(milestone.predecessor or ""))
        except SourceError as error:
            raise _plugin_error(f"{page}: {error}") from error
        files.append(File.generated(config, page, content=content))


def on_serve(server: "LiveReloadServer", config: "MkDocsConfig", builder: object) -> None:
    """Let `mkdocs serve` build anew when the source changes."""
    root = Path(config.config_file_path).parent
    for name in ("pyproject.toml", *(milestone.name for milestone in _ledger(config))):
        server.watch(str(root / name))


def _ledger(config: "MkDocsConfig") -> list[Milestone]:
    try:
        milestones = load_ledger(Path(config.config_file_path).parent)
    except LedgerError as error:
        raise _plugin_error(str(error)) from error
    for fault in order_faults(milestones):
        raise _plugin_error(fault)
    return milestones


def _plugin_error(message: str) -> Exception:
    from mkdocs.exceptions import PluginError

    return PluginError(message)


def title_of(milestone: Milestone) -> str:
    """The title of the milestone's page of changes, in the navigation and on the page."""
    here = version_of(milestone.name)
    return f"{version_of(milestone.predecessor)} → {here}" if milestone.predecessor else f"Source of {here}"


def render(root: Path, milestone: Milestone, predecessor: Milestone | None) -> str:
    """The page of changes in Markdown; equal trees give equal pages.

    Raises:
        SourceError: the ledger lists a file that is not there or is not text.
    """
    title = title_of(milestone)
    changes = list(file_changes(root, milestone, predecessor))
    lines = ["---", f"title: {title}", "search:", "  exclude: true", "hide:", "  - toc", "---", "", f"# {title}", ""]
    lines += [introduction(milestone, predecessor), "", *table(changes), ""]
    if milestone.same:
        lines += [f"Unchanged: {', '.join(f'`{path}`' for path in milestone.same)}.", ""]
    for change in changes:
        if change.body:
            lines += [f"## `{change.path}` {{ #{anchor_of(change.path)} }}", ""]
            lines += [f'???+ {change.status} "{change.summary}"', "", indent(change.body, "    "), ""]
    return "\n".join(lines)


def introduction(milestone: Milestone, predecessor: Milestone | None) -> str:
    """What the page compares, and where the lesson is."""
    lesson = f"[the lesson]({relative_link(lesson_page(milestone), changes_page(milestone))})"
    if predecessor is None:
        return (
            f"Every file of `{milestone.name}/`, the first milestone (*{milestone.title}*), "
            f"as it was when this site was built. What it is about: {lesson}."
        )
    return (
        f"From *{predecessor.title}* to *{milestone.title}*, file by file, as it was when this site was built. "
        f"The same on your machine: `diff -ru {predecessor.name} {milestone.name}`. Why it changed: {lesson}."
    )


def table(changes: list[FileChange]) -> list[str]:
    """The files at a glance, each with a link to its section."""
    rows = ["| File | Status | Added | Removed |", "|---|---|--:|--:|"]
    for change in changes:
        name = f"[`{change.path}`](#{anchor_of(change.path)})" if change.body else f"`{change.path}`"
        rows.append(f"| {name} | {change.status} | {_count('+', change.added)} | {_count('−', change.removed)} |")
    added, removed = sum(change.added for change in changes), sum(change.removed for change in changes)
    rows.append(f"| **all** | | **{_count('+', added)}** | **{_count('−', removed)}** |")
    return rows


def _count(sign: str, number: int) -> str:
    return f"{sign}{number}" if number else "0"


def file_changes(root: Path, milestone: Milestone, predecessor: Milestone | None) -> Iterator[FileChange]:
    """Changed, new and dropped files, each kind in the ledger's order."""
    before = predecessor.name if predecessor else ""
    for path in milestone.changed:
        old, new = f"{before}/{path}", f"{milestone.name}/{path}"
        diff, added, removed = unified_diff(_text(root, old), _text(root, new), old, new)
        summary = f"diff, +{added} −{removed} lines"
        yield FileChange(path, "changed", added, removed, fence(diff, "diff"), summary)
    for path in milestone.new:
        text = _text(root, f"{milestone.name}/{path}")
        num_lines = len(_lines(text))
        body = fence(text, language_of(path)) if text else "The file is empty."
        summary = f"whole file, {num_lines} {'line' if num_lines == 1 else 'lines'}"
        yield FileChange(path, "new", num_lines, 0, body, summary)
    for path in milestone.dropped:
        yield FileChange(path, "dropped", 0, len(_lines(_text(root, f"{before}/{path}"))))


def _text(root: Path, path: str) -> str:
    """The file's text, or one line that stands for what is no text."""
    file = root / path
    if file.is_file() and b"\0" in (content := file.read_bytes()):
        return f"(not text: {len(content)} bytes, SHA-256 {sha256(content).hexdigest()[:16]})\n"
    return read_source(root, path)


def unified_diff(old: str, new: str, old_name: str, new_name: str) -> tuple[str, int, int]:
    """The diff in `diff -u`'s form, and the number of lines added and removed.

    `difflib.unified_diff` is not used: in files of 200 lines or more it takes frequent lines for noise, and its diffs
    get longer than they need to be. As git does, a hunk names the definition that it begins in.
    """
    before, after = _lines(old), _lines(new)
    lines, added, removed = [f"--- {old_name}", f"+++ {new_name}"], 0, 0
    for hunk in SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(CONTEXT):
        old_start, old_end, new_start, new_end = hunk[0][1], hunk[-1][2], hunk[0][3], hunk[-1][4]
        above = next((line for line in reversed(before[:old_start]) if DEFINITION.match(line)), "").strip()
        ranges = f"-{_range(old_start, old_end)} +{_range(new_start, new_end)}"
        lines.append(f"@@ {ranges} @@ {above}".rstrip())
        for kind, i1, i2, j1, j2 in hunk:
            if kind == "equal":
                lines += [_line(" ", line) for line in before[i1:i2]]
                continue
            lines += [_line("-", line) for line in before[i1:i2]]
            lines += [_line("+", line) for line in after[j1:j2]]
            removed += i2 - i1
            added += j2 - j1
    return "\n".join(lines) + "\n", added, removed


def _lines(text: str) -> list[str]:
    """Lines with their ends, so that a last line without one is different from one with it. Only "\\n" ends a line."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _line(sign: str, line: str) -> str:
    return sign + (line.removesuffix("\n") if line.endswith("\n") else line + "\n\\ No newline at end of file")


def _range(start: int, end: int) -> str:
    """Where a hunk stands, from 1; an empty range names the line before it."""
    return f"{start + 1 if end > start else start},{end - start}"
