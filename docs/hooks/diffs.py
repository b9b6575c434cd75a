"""Hook: a page of changes for every milestone, made from the ledger and the tree while the site is built.

    v0.1    "Source of v0.1": a table of its files
    v0.2 …  "v0.1 → v0.2": a table of the files, and the diff of each that changed

Each new file has a page of its own, to which the table links: a page of changes shows only what changed.

A file that the ledger lists as dropped and, under another path, as new was moved: it is shown as such, with the diff
against the old path if it was edited. A folder that is the same as before, or gone, is one name if the ledger lists it.

Nothing is written to docs/. The pages of changes stand in the navigation where `mkdocs.yml` has the empty section
"Changes"; all of these pages are left out of the search, which would find every line twice. Whether the ledger is true
is not asked here: that is `python -m tools.ledger check`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from comparison import lines_of, unified_diff
from sources import (
    SourceError,
    anchor_of,
    changes_page,
    fence,
    file_page,
    indent,
    language_of,
    lesson_page,
    moves,
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


@dataclass(frozen=True, slots=True)
class FileChange:
    """What happened to one file.

    `diff` is what its section shows, in Markdown, or empty if it has none; `link` leads from the table to wherever the
    file is shown.
    """

    path: str
    status: str
    added: int
    removed: int
    diff: str = ""
    link: str = ""


def on_config(config: "MkDocsConfig") -> None:
    """Fill the section of the navigation."""
    milestones = _ledger(config)
    pages: list[object] = [{title_of(milestone): changes_page(milestone)} for milestone in milestones]
    sections = list(_sections(config.nav or []))
    if len(sections) != 1:
        raise _plugin_error(f"the navigation in mkdocs.yml needs one section {SECTION!r}: `- {SECTION}: []`")
    sections[0][SECTION] = pages


def _sections(nav: object) -> Iterator[dict[str, object]]:
    """The entries of the navigation, however deep, that have the section of the changes."""
    for entry in nav if isinstance(nav, list) else []:
        if isinstance(entry, dict):
            if SECTION in entry:
                yield entry
            for below in entry.values():
                yield from _sections(below)


def on_files(files: "Files", config: "MkDocsConfig") -> None:
    """Add the pages to those of docs/."""
    from mkdocs.structure.files import File, InclusionLevel  # here, so that the rest can be tested without mkdocs

    root = Path(config.config_file_path).parent
    milestones = _ledger(config)
    by_name = {milestone.name: milestone for milestone in milestones}
    for milestone in milestones:
        try:
            pages = {changes_page(milestone): render(root, milestone, by_name.get(milestone.predecessor or ""))}
            pages |= dict(file_pages(root, milestone))
        except SourceError as error:
            raise _plugin_error(f"{changes_page(milestone)}: {error}") from error
        for page, content in pages.items():
            if files.get_file_from_path(page) is not None:
                raise _plugin_error(f"docs/{page} is in the way of the generated page: remove it")
            in_nav = InclusionLevel.INCLUDED if page == changes_page(milestone) else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, page, content=content, inclusion=in_nav))


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
        lines += [f"Unchanged: {', '.join(unchanged(milestone))}.", ""]
    for change in changes:
        if change.diff:
            lines += [f"## `{change.path}` {{ #{anchor_of(change.path)} }}", ""]
            summary = f"diff, +{change.added} −{change.removed} lines"  # no name: `__init__` would be emphasis
            lines += [f'???+ changed "{summary}"', "", indent(change.diff, "    "), ""]
    return "\n".join(lines)


def file_pages(root: Path, milestone: Milestone) -> Iterator[tuple[str, str]]:
    """The pages of the new files, each `(page, text in Markdown)`."""
    for path in _really_new(root, milestone):
        page, text = file_page(milestone, path), _text(root, f"{milestone.name}/{path}")
        back = f"[{title_of(milestone)}]({relative_link(changes_page(milestone), page)})"
        lines = ["---", f'title: "{path}"', "search:", "  exclude: true", "hide:", "  - toc", "---", ""]
        lines += [f"# `{path}`", "", f"New in `{milestone.name}`, {_num_lines(text)}. All changes: {back}.", ""]
        yield page, "\n".join([*lines, fence(text, language_of(path)) if text else "The file is empty.", ""])


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
        name = f"[`{change.path}`]({change.link})" if change.link else f"`{change.path}`"
        rows.append(f"| {name} | {change.status} | {_count('+', change.added)} | {_count('−', change.removed)} |")
    added, removed = sum(change.added for change in changes), sum(change.removed for change in changes)
    rows.append(f"| **all** | | **{_count('+', added)}** | **{_count('−', removed)}** |")
    return rows


def _count(sign: str, number: int) -> str:
    return f"{sign}{number}" if number else "0"


def unchanged(milestone: Milestone) -> Iterator[str]:
    """The files that are the same, in the ledger's words."""
    for entry in dict.fromkeys(entry_of(milestone, path) for path in milestone.same):
        yield f"`{entry}`" if is_whole(milestone, entry) else f"the rest of `{entry}`"


def entry_of(milestone: Milestone, path: str) -> str:
    """What the ledger lists the file by: its folder, or its own name."""
    return next((folder.path for folder in milestone.folders if path in folder.files), path)


def is_whole(milestone: Milestone, entry: str) -> bool:
    """Whether the entry is a file, or a folder whose files are all of one kind."""
    below = {kind for kind, path in milestone.listed() if path.startswith(entry)}
    return len(below) == 1 or not entry.endswith("/")


def file_changes(root: Path, milestone: Milestone, predecessor: Milestone | None) -> Iterator[FileChange]:
    """Changed, new (or moved) and dropped files, each kind in the ledger's order."""
    before = predecessor.name if predecessor else ""
    moved = moves(root, milestone)
    moved_away = {move.path for move in moved.values()}
    for path in milestone.changed:
        yield _changed(root, f"{before}/{path}", milestone.name, path)
    for path in _really_new(root, milestone):
        num_lines = len(lines_of(_text(root, f"{milestone.name}/{path}")))
        link = relative_link(file_page(milestone, path), changes_page(milestone))
        yield FileChange(path, "new", num_lines, 0, link=link)
    for path, move in moved.items():
        if move.is_equal:
            yield FileChange(path, f"moved from `{move.path}`", 0, 0)
        else:
            change = _changed(root, f"{before}/{move.path}", milestone.name, path)
            yield replace(change, status=f"changed, moved from `{move.path}`")
    yield from _dropped(root, milestone, before, [path for path in milestone.dropped if path not in moved_away])


def _changed(root: Path, old: str, milestone: str, path: str) -> FileChange:
    """A file with its diff against the one at `old`, which is relative to the repository."""
    new = f"{milestone}/{path}"
    diff, added, removed = unified_diff(_text(root, old), _text(root, new), old, new)
    hunks = diff.split("\n", 2)[2]  # without the names of the files, which would be coloured as changes
    return FileChange(path, "changed", added, removed, fence(hunks, "diff"), f"#{anchor_of(path)}")


def _really_new(root: Path, milestone: Milestone) -> list[str]:
    """The new files that were not moved from elsewhere, in the ledger's order."""
    moved = moves(root, milestone)
    return [path for path in milestone.new if path not in moved]


def _num_lines(text: str) -> str:
    count = len(lines_of(text))
    return f"{count} {'line' if count == 1 else 'lines'}"


def _dropped(root: Path, milestone: Milestone, before: str, paths: Sequence[str]) -> Iterator[FileChange]:
    """The files `paths`, which the milestone `before` has; those of a folder that is gone are counted together."""
    removed = Counter[str]()
    for path in paths:
        entry = entry_of(milestone, path)
        name = entry if is_whole(milestone, entry) else path
        removed[name] += len(lines_of(_text(root, f"{before}/{path}")))
    for name, num_lines in removed.items():
        yield FileChange(name, "dropped", 0, num_lines)


def _text(root: Path, path: str) -> str:
    """The file's text, or one line that stands for what is no text."""
    file = root / path
    if file.is_file() and b"\0" in (content := file.read_bytes()):
        return f"(not text: {len(content)} bytes, SHA-256 {sha256(content).hexdigest()[:16]})\n"
    return read_source(root, path)
