"""Hook: the notebooks in the site's own markup, with nothing loaded from another host.

mkdocs-jupyter runs a notebook while the site is built and gives a page of JupyterLab's: half a megabyte of its style
sheets, scripts that fetch mermaid and MathJax from a CDN, light colours in the dark palette. Of that page only what the
notebook says is kept (its texts, its code, what it printed, its plots), as the theme shows such things elsewhere. An
output of another kind ends the build: it would need a script or a style that is not here.

What a cell measured depends on the machine that builds the site, and on what else that does meanwhile. Such a cell is
tagged (`# %% tags=["timed"]`), and below its output the page says on what it ran and that a lesson's figures do not
come from there.
"""

import itertools
import os
import posixpath
import socket
from collections.abc import Callable, Iterable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from common.measuring.recipe import machine

if TYPE_CHECKING:
    from bs4 import Tag
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

FOLDER = "notebooks/"
MARKDOWN, PRINTED, PLOT = "jp-RenderedMarkdown", "jp-RenderedText", "jp-RenderedImage"  # classes of JupyterLab
TIMED = "celltag_timed"  # nbconvert's class for a cell with the tag `timed`


class NotebookError(ValueError):
    """A notebook has what the site cannot show: the message says what."""


def on_config(config: "MkDocsConfig") -> None:
    """Prepare what the kernels inherit."""
    os.environ.pop("MPLBACKEND", None)  # `Agg` would lose the plots without a word
    os.environ["MATPLOTLIBRC"] = str(Path(config.docs_dir) / FOLDER / "matplotlibrc")
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # no widgets: a page could not show them
    # Threads that wait for each other spin, and on a machine that is busy they do so for minutes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if hasattr(socket, "AF_UNIX"):
        from jupyter_client.manager import KernelManager

        KernelManager.transport.default_value = "ipc"  # over TCP everybody on the machine could listen


def on_page_content(html: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """mkdocs calls this with every page's HTML, without the theme around it."""
    from mkdocs.exceptions import PluginError  # here, so that the rest can be tested without mkdocs

    source = page.file.src_uri
    if not (source.startswith(FOLDER) and source.endswith(".py")):
        return html

    def address(target: str) -> str:
        file = files.get_file_from_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        if file is None:
            raise NotebookError(f"links to {target}, which is not on the site")
        return file.url_relative_to(page.file)

    try:
        return tidy(html, address, where_it_ran())
    except NotebookError as error:
        raise PluginError(f"{source}: {error}") from error


def where_it_ran() -> str:
    """What a reader has to know of the times in a notebook that has just run here."""
    here = machine()
    cores = f"{here['cores']} core{'' if here['cores'] == 1 else 's'}"
    threads = os.environ["OMP_NUM_THREADS"]
    load = f", with a load of {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"Timed as this page was built, on {here['cpu']} with {cores}{load}; PyTorch had {threads} "
        f"thread{'' if threads == '1' else 's'}. The lessons' figures were measured with nothing else running, on "
        "the machine that each results file names. So compare these times with each other only."
    )


def tidy(html: str, address: Callable[[str], str], timed: str) -> str:
    """The notebook's cells, in order, as the theme's elements.

    Args:
        html: what mkdocs-jupyter gives.
        address: the address on the site of what a link to a source file means, such as `../milestones/v0_1.md`.
        timed: what is said below the output of a cell that is tagged `timed`.

    Raises:
        NotebookError: there are no cells, an output is neither text nor a plot, or a timed cell shows nothing.
    """
    from bs4 import BeautifulSoup  # comes with nbconvert

    cells = BeautifulSoup(html, "html.parser").select(".jp-Notebook-cell[id]")
    if not cells:
        raise NotebookError("no cells: has mkdocs-jupyter's markup changed?")
    parts = []
    for cell in cells:
        text = cell.select_one(f".{MARKDOWN}")
        if text is not None:
            parts.append(_text(text, address))
            continue
        code = cell.select_one(".jp-InputArea pre")
        if code is None:
            raise NotebookError("a cell is neither text nor code: has mkdocs-jupyter's markup changed?")
        parts.append(f'<div class="language-python highlight"><pre><code>{code.decode_contents()}</code></pre></div>')
        outputs = list(_outputs(cell.select(".jp-OutputArea-output")))
        parts += outputs
        if TIMED in cell["class"]:
            if not outputs:
                raise NotebookError("a cell is tagged `timed` and shows nothing")
            parts.append(f'<p class="notebook-timed">{escape(timed)}</p>')
    return "\n".join(parts)


def _text(text: "Tag", address: Callable[[str], str]) -> str:
    """A cell of Markdown: links to source files are turned, headings get the theme's link."""
    for link in text.select("a"):
        if "anchor-link" in link.get("class", []):
            link["class"], link["title"] = "headerlink", "Permanent link"
            continue
        parts = urlsplit(link["href"])
        if parts.path and not (parts.scheme or parts.netloc):
            link["href"] = address(parts.path) + (f"#{parts.fragment}" if parts.fragment else "")
    return text.decode_contents().strip()


def _outputs(outputs: "Iterable[Tag]") -> Iterator[str]:
    """What a cell gave. Lines that were printed one after the other may come in several pieces: they are one text."""
    for is_printed, group in itertools.groupby(outputs, key=_is_printed):
        if is_printed:
            yield f'<pre class="notebook-output">{"".join(output.pre.decode_contents() for output in group)}</pre>'
            continue
        for output in group:
            if PLOT not in output["class"]:
                raise NotebookError(f"an output of class {' '.join(output['class'])} is neither text nor a plot")
            alt = "The plot that the code above draws"
            yield f'<p class="notebook-plot"><img alt="{alt}" src="{output.img["src"]}"></p>'


def _is_printed(output: "Tag") -> bool:
    return PRINTED in output["class"]
