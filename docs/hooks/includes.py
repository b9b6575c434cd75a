"""Hook: a file of the repository inside a page, so that the page cannot drift from it.

    --include-- design.md
    --include-- NOTES.md Other engines
    --include-- docs/img/v0_1_cache.svg

The second is one section of a file, by its heading, with what is below it; its headings rise, so that its own is the
page's. A Markdown file is included with its links turned to where the site shows their targets; a link to a file that
the site does not show loses the link and keeps its text, and one to a file that does not exist ends the build. An SVG
is put into the page itself, so that its `currentColor` follows the light and the dark palette; its ids must be unique
on the page. HTML inside an included file is left alone: `tools/sitecheck.py` looks at its links afterwards.
"""

import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sources import (
    SourceError,
    lesson_page,
    place_of,
    read_source,
    relative_link,
    replace_directives,
    split_fences,
)

from tools.milestones import LedgerError, Milestone, load_ledger

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PAGES = {"design.md": "design.md", "NOTES.md": "notes.md", "README.md": "index.md"}  # at the root: on the site
INLINE = re.compile(
    r"(?P<code>(?<!`)(?P<ticks>`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)(?P=ticks)(?!`))"
    r'|(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\(\s*<?(?P<target>[^()<>\s]+)>?(?P<title>\s+"[^"]*")?\s*\)',
    re.DOTALL,
)
HEADING = re.compile(r"(#{1,6}) ")
REFERENCE = re.compile(r"^(?P<label> {0,3}\[[^\]]+\]:\s+)<?(?P<target>[^<>\s]+)>?", re.MULTILINE)


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """mkdocs calls this with every page's text, before it is read as Markdown."""
    from mkdocs.exceptions import PluginError  # here, so that the rest can be tested without mkdocs

    try:
        return expand(markdown, page.file.src_uri, Path(config.config_file_path).parent)
    except (SourceError, LedgerError) as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def expand(markdown: str, page: str, root: Path) -> str:
    """The text of a page with the included files in place; `page` is its source file, relative to docs/."""

    def replacement(arguments: str) -> str:
        path, _, heading = arguments.partition(" ")
        text = read_source(root, path)
        if path.endswith(".svg") and not heading:
            return drawing(text)
        if path.endswith(".md"):
            text = section(text, heading.strip(), path) if heading else text
            return turn_links(text, path, page, root, load_ledger(root))
        raise SourceError(f"{path} is neither Markdown nor SVG: use --excerpt-- for source")

    return replace_directives(markdown, "include", replacement)


def section(markdown: str, heading: str, path: str) -> str:
    """The part of a file from a heading to the next one that is not below it, as a text of its own.

    Raises:
        SourceError: that heading is not there exactly once.
    """
    lines = [(line, is_code) for is_code, text in split_fences(markdown) for line in text.split("\n")]
    levels = [0 if is_code else len(match[1]) if (match := HEADING.match(line)) else 0 for line, is_code in lines]
    found = [i for i, (line, _) in enumerate(lines) if levels[i] and line.lstrip("#").strip() == heading]
    if len(found) != 1:
        raise SourceError(f"{path} has the heading {heading!r} {len(found)} times, not once")
    start, level = found[0], levels[found[0]]
    end = next((i for i in range(start + 1, len(lines)) if 0 < levels[i] <= level), len(lines))
    return "\n".join(
        line[level - 1 :] if rank else line for (line, _), rank in zip(lines[start:end], levels[start:end], strict=True)
    )


def drawing(svg: str) -> str:
    """An SVG file as a block of HTML; without the prologue of a file of its own, which HTML does not know."""
    svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>", "", svg, flags=re.DOTALL).strip()
    return f'<figure class="drawing">\n{svg}\n</figure>\n'


def turn_links(markdown: str, source: str, page: str, root: Path, milestones: Sequence[Milestone]) -> str:
    """The text of `source`, a file of the repository, with links that are right on `page`."""

    def link(match: re.Match[str]) -> str:
        if match["code"] is not None or is_elsewhere(match["target"]):
            return match[0]
        place = shown_at(match["target"], source, root, milestones)
        if place is not None:
            target = relative_link(place, page)
            return f"{match['image']}[{match['text']}]({target}{match['title'] or ''})"
        path = in_repository(match["target"], source)
        if match["image"]:
            raise SourceError(f"{source} shows {path}, which is not under docs/")
        return match["text"] if path in match["text"] else f"{match['text']} (`{path}`)"

    def reference(match: re.Match[str]) -> str:
        if is_elsewhere(match["target"]):
            return match[0]
        place = shown_at(match["target"], source, root, milestones)
        if place is None:
            raise SourceError(f"{source} refers to {match['target']}, which is not on the site: link it in the text")
        return match["label"] + relative_link(place, page)

    pieces = split_fences(markdown)
    return "\n".join(text if is_code else REFERENCE.sub(reference, INLINE.sub(link, text)) for is_code, text in pieces)


def is_elsewhere(target: str) -> bool:
    """Whether a link leaves the repository, or stays on its own page."""
    return target.startswith(("#", "//")) or re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", target) is not None


def in_repository(target: str, source: str) -> str:
    """The path, from the root, that a link in the file `source` means; its anchor is left out."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target.partition("#")[0]))


def shown_at(target: str, source: str, root: Path, milestones: Sequence[Milestone]) -> str | None:
    """The page (relative to docs/, with its anchor) that shows what `target` means in the file `source`.

    `None`: the file exists, but the site does not show it.

    Raises:
        SourceError: nothing of the repository is there.
    """
    _, mark, fragment = target.partition("#")
    path = in_repository(target, source)
    if path.startswith("..") or not (root / path).exists():
        raise SourceError(f"{source} links to {target}, which is not in the repository")
    if path == "README.md":
        return PAGES[path]  # the home page is a text of its own, with other headings
    if path in PAGES:
        return PAGES[path] + mark + fragment
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + mark + fragment
    for milestone in milestones:
        if path == milestone.name:
            return lesson_page(milestone)
    place = place_of(root, path, milestones)
    return place.target if place else None
