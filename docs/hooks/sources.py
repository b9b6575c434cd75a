"""Where the site shows a file of the repository, how its text is fenced, and how a page's directives are found.

The hooks beside this file share it. It knows the repository and Markdown, but nothing of mkdocs, so that it can
be tested without it; the hooks turn its `SourceError` into one that ends the build.

A directive is a line of its own outside every code fence, `--name-- arguments`. It may be indented (in a list, in an
admonition), and what replaces it is then indented alike.
"""

import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `mkdocs` does not look in the repository's root

from comparison import Move, moved_files

from tools.milestones import Milestone

LANGUAGES = {  # names of Pygments' lexers; any other file is shown without colours
    ".py": "python",
    ".c": "c",
    ".h": "c",
    ".cpp": "cpp",
    ".cu": "cuda",
    ".html": "html",
    ".css": "css",
    ".js": "javascript",
    ".mjs": "javascript",
    ".toml": "toml",
    ".json": "json",
    ".yml": "yaml",
}
FENCE = re.compile(r"\s*(?P<fence>`{3,}(?=[^`]*$)|~{3,})")


class SourceError(ValueError):
    """A page names something that is not there, or that the site cannot show: the message says what."""


def language_of(path: str) -> str:
    """The name by which a fence colours the file's text."""
    return LANGUAGES.get(PurePosixPath(path).suffix, "text")


def fence(text: str, language: str, title: str = "") -> str:
    """`text` as a code fence, longer than every run of backticks in the text: a shorter one would end inside it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    option = f' title="{title}"' if title else ""
    end = "" if text.endswith("\n") else "\n"
    return f"{ticks}{language}{option}\n{text}{end}{ticks}\n"


def indent(text: str, width: str) -> str:
    """Every line that is not empty behind `width`. Unlike `textwrap.indent`, a form feed is no end of a line."""
    return "\n".join(width + line if line else line for line in text.split("\n"))


def read_source(root: Path, path: str) -> str:
    """The text of the file at `path`, which is relative to the repository.

    Raises:
        SourceError: there is no such file inside the repository, or it is not text.
    """
    file = (root / path).resolve()
    if not file.is_relative_to(root.resolve()) or not file.is_file():
        raise SourceError(f"{path} is no file of the repository")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 text: {error}") from error


def version_of(name: str) -> str:
    """`v0_3_scheduler` as `v0.3`."""
    match = re.match(r"v(\d+)_(\d+)", name)
    if match is None:
        raise SourceError(f"{name} is no name of a milestone: it does not begin like v0_1")
    return f"v{match[1]}.{match[2]}"


def lesson_page(milestone: Milestone) -> str:
    """The source file, relative to docs/, of the page that the milestone's lesson is on."""
    return f"milestones/{version_of(milestone.name).replace('.', '_')}.md"


def changes_page(milestone: Milestone) -> str:
    """The same of the generated page with the milestone's changes."""
    return f"changes/{version_of(milestone.name).replace('.', '_')}.md"


def file_page(milestone: Milestone, path: str) -> str:
    """The same of the generated page that shows one file of the milestone whole."""
    return f"{changes_page(milestone).removesuffix('.md')}/{path}.md"


def anchor_of(path: str) -> str:
    """The id of a file's heading on a page of changes; `path` is relative to the milestone's folder."""
    return re.sub(r"[^A-Za-z0-9]+", "-", path).strip("-").lower()  # underscores would be read as emphasis


class Place(NamedTuple):
    """Where a file is shown: a page of its own, whole, or a diff: page and anchor. Relative to docs/."""

    target: str
    whole: bool


def moves(root: Path, milestone: Milestone) -> dict[str, Move]:
    """The milestone's new files that are dropped ones of its predecessor, moved: by their new paths."""
    if milestone.predecessor is None:
        return {}
    return moved_files(root / milestone.name, milestone.new, root / milestone.predecessor, milestone.dropped)


def place_of(root: Path, path: str, milestones: Sequence[Milestone]) -> Place | None:
    """The place that shows a file of a milestone.

    A file that is the same as before, moved or not, is shown where it was changed last. `None`: no page shows it.
    """
    by_name = {milestone.name: milestone for milestone in milestones}
    folder, _, inside = path.partition("/")
    milestone = by_name.get(folder)
    while milestone is not None:
        kind = milestone.kind(inside)
        move = moves(root, milestone).get(inside) if kind == "new" else None
        if move is not None and move.is_equal:
            inside = move.path
        elif kind == "new" and move is None:
            return Place(file_page(milestone, inside), whole=True)
        elif kind in ("new", "changed"):
            return Place(f"{changes_page(milestone)}#{anchor_of(inside)}", whole=False)
        elif kind != "same":
            return None
        milestone = by_name.get(milestone.predecessor or "")
    return None


def relative_link(target: str, page: str) -> str:
    """`target` as a link from `page`, both relative to docs/; an anchor stays at its end."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def split_fences(markdown: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces, `(is code, text)`: joined by line ends they are the text again."""
    lines: list[str] = []
    code, opening = False, ""
    for line in markdown.split("\n"):
        match = FENCE.match(line)
        if not code and match:
            if lines:
                yield False, "\n".join(lines)
            code, lines, opening = True, [line], match["fence"]
            continue
        lines.append(line)
        # A fence ends at a run of exactly its own length: so does the extension that reads it (superfences).
        if code and line.strip() == opening:
            yield True, "\n".join(lines)
            code, lines = False, []
    if lines:
        yield code, "\n".join(lines)


def replace_directives(markdown: str, name: str, replacement: Callable[[str], str]) -> str:
    """Replace every `--name-- arguments` by what `replacement` makes of its arguments."""
    pattern = re.compile(rf"^([ \t]*)--{re.escape(name)}--(.*)$", re.MULTILINE)

    def replace(match: re.Match[str]) -> str:
        return indent(replacement(match[2].strip()), match[1])

    pieces = split_fences(markdown)
    return "\n".join(text if is_code else pattern.sub(replace, text) for is_code, text in pieces)
