"""Hook: the visualizer's page as a part of the site, and recordings that play in it within other pages.

The files of the newest milestone's `web/` are copied to `visualizer/` as they are. A line

    --replay-- recordings/batching.jsonl | Eight requests in one batch | A caption: what to look at.

becomes a frame in which that file of docs/ is played, without a server. A recording that is not there ends the build.
"""

import html
import posixpath
from pathlib import Path
from typing import TYPE_CHECKING

from sources import SourceError, replace_directives

from tools.milestones import newest_page

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PAGE = "visualizer/index.html"


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """mkdocs calls this once it knows all files of docs/."""
    from mkdocs.structure.files import File

    for path in web_files(Path(config.config_file_path).parent):
        files.append(File.generated(config, posixpath.join(posixpath.dirname(PAGE), path.name), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """mkdocs calls this with every page's text, before it is read as Markdown."""
    from mkdocs.exceptions import PluginError

    try:
        return expand(markdown, page.file.dest_uri, Path(config.config_file_path).parent / "docs")
    except SourceError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def web_files(root: Path) -> list[Path]:
    """The files of the page, of the newest milestone that has one."""
    folder = newest_page(root)
    return sorted(filter(Path.is_file, folder.iterdir())) if folder is not None else []


def expand(markdown: str, page: str, docs: Path) -> str:
    """The text of a page with its replays in place; `page` is where it will lie in the site."""

    def replacement(arguments: str) -> str:
        parts = [part.strip() for part in arguments.split("|")]
        if len(parts) != 3 or not all(parts):
            raise SourceError(f"--replay-- {arguments}: it takes a file, a title and a caption, with | between them")
        file, title, caption = parts
        if not (docs / file).is_file():
            raise SourceError(f"there is no recording {file} in docs/")
        source = posixpath.relpath(PAGE, posixpath.dirname(page) or ".")
        query = f"{source}?recording={posixpath.relpath(file, posixpath.dirname(PAGE))}"
        return (
            f'<iframe class="replay" src="{query}&amp;embed" title="{html.escape(title)}" loading="lazy"></iframe>\n\n'
            f'{caption} <a href="{query}">Open it in full.</a>\n'
        )

    return replace_directives(markdown, "replay", replacement)
