"""Gates over the built site: it loads nothing from another host, no local link is dead, and what it shows can be read.

    python -m tools.sitecheck site

`mkdocs build --strict` sees only links that are written in Markdown. This reads what was built: pages, style sheets and
scripts, as a browser would, but runs nothing. A link to another site is no load and is never asked whether it answers.
What a script puts together at run time is not found, but for the theme's own cases (`LAZY_LOADERS`).

What can be read: no page is larger than `MAX_PAGE_BYTES`, no line of code is longer than its column (`CODE_COLUMNS`),
and no drawing that stands on the page as a picture has a white ground, which would shine in the dark palette.
"""

import argparse
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

# Addresses in string literals of the theme's script which no page of ours makes it use: mermaid, GitHub and GitLab need
# elements that LAZY_LOADERS refuses, the polyfill a browser from before 2020.
ALLOWED_IN_SCRIPTS = (
    "http://www.w3.org/",  # names of namespaces, which nobody loads
    "https://unpkg.com/mermaid@",
    "https://unpkg.com/resize-observer-polyfill",
    "https://api.github.com/",
    "https://${",  # GitLab, whose host comes from the page; Pyodide's unused sockets
    "https://cdn.jsdelivr.net/pyodide/",  # where Pyodide looks for itself unless it is told a folder, as it is
)
LAZY_LOADERS = {"mermaid": "unpkg.com", "md-source": "the repository's host"}  # by class of the element

MAX_PAGE_BYTES = 350_000  # the exercises are the largest: 32 with their solutions, some 60 kB when they travel
# Characters of a line of code that can be read in a window 1280 pixels wide, by the page's folder: a page of changes
# does not wrap its lines; elsewhere a line of 112 fits, and one that is longer is wrapped, twice at most.
CODE_COLUMNS = {"changes/": 140, "": 336}
WHITE = re.compile(r"(?:^|fill:\s*)(?:#fff(?:fff)?|white)\b", re.IGNORECASE)

LOADING = {  # attributes whose address the browser fetches as it shows the page
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("embed", "src"),
    ("object", "data"),
    ("audio", "src"),
    ("video", "src"),
    ("video", "poster"),
    ("source", "src"),
    ("track", "src"),
    ("input", "src"),
    ("use", "href"),
    ("image", "href"),
    ("use", "xlink:href"),
    ("image", "xlink:href"),
}
LINKING = {("a", "href"), ("area", "href"), ("a", "xlink:href"), ("form", "action")}
LOADING_RELS = {"stylesheet", "icon", "apple-touch-icon", "manifest", "preload", "prefetch", "modulepreload"}
LOADING_RELS |= {"preconnect", "dns-prefetch"}  # no load yet, but the other host learns of the reader
IN_CSS = re.compile(r"""url\(\s*["']?([^"')]+)["']?\s*\)|@import\s+["']([^"']+)["']""", re.IGNORECASE)
IN_SCRIPT = re.compile(r"""["'`]((?:https?://|//[\w-]+\.)[^"'`\s\\]+)""")


@dataclass(slots=True)
class Document:
    """What one file of the site refers to. Addresses are as written; `text` is what a script consists of."""

    loads: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    scripts: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)  # the lines of its code blocks
    num_bytes: int = 0


class PageParser(HTMLParser):
    """Fills a `Document` from a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.document = Document()
        self._inside = ""  # `style` or `script`: the element whose text comes next
        self._block: list[str] | None = None  # the text of the code block that is being read

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag if tag in ("style", "script") else ""
        if tag == "pre":
            self._block = []
        page, values = self.document, {name: value or "" for name, value in attrs}
        for name, value in values.items():
            if (tag, name) in LOADING:
                page.loads.append(value)
            elif (tag, name) in LINKING:
                page.links.append(value)
            elif name in ("srcset", "imagesrcset"):
                page.loads += [candidate.split()[0] for candidate in value.split(",") if candidate.strip()]
            elif name == "style" or "url(" in value:
                page.loads += addresses_in_css(value)
        if tag == "link" and "href" in values:
            loading = LOADING_RELS & set(values.get("rel", "").lower().split())
            (page.loads if loading else page.links).append(values["href"])
        page.ids.update(value for value in (values.get("id"), values.get("name") if tag == "a" else None) if value)
        page.classes.update(values.get("class", "").split())

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""
        if tag == "pre" and self._block is not None:
            self.document.code += "".join(self._block).split("\n")
            self._block = None

    def handle_data(self, data: str) -> None:
        if self._block is not None:
            self._block.append(data)
        if self._inside == "style":
            self.document.loads += addresses_in_css(data)
        elif self._inside == "script":
            self.document.scripts.append(data)


def addresses_in_css(text: str) -> list[str]:
    """The addresses in `url(...)` and `@import`; comments are left out."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return [(match[1] or match[2]).strip() for match in IN_CSS.finditer(text)]


def read_site(site: Path) -> dict[str, Document]:
    """Every page, style sheet, drawing and script under `site`, by its path with forward slashes."""
    documents = {}
    for file in sorted(site.rglob("*")):
        if not file.is_file() or file.suffix not in (".html", ".svg", ".css", ".js", ".mjs"):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix in (".html", ".svg"):
            parser = PageParser()
            parser.feed(text)
            parser.close()
            document = parser.document
        elif file.suffix == ".css":
            document = Document(loads=addresses_in_css(text))
        else:
            document = Document(scripts=[text])
        document.num_bytes = file.stat().st_size
        documents[file.relative_to(site).as_posix()] = document
    return documents


def external_loads(documents: dict[str, Document]) -> Iterator[str]:
    """One line for each load from another host."""
    for path, document in documents.items():
        for address in document.loads:
            parts = urlsplit(address)
            if parts.netloc or parts.scheme not in ("", "data", "blob"):
                yield f"{path}: loads {address}"
        for script in document.scripts:
            for match in IN_SCRIPT.finditer(script):
                if not match[1].startswith(ALLOWED_IN_SCRIPTS):
                    yield f"{path}: a script may load {match[1]}"
        for name in sorted(document.classes & LAZY_LOADERS.keys()):
            yield f"{path}: an element of class {name} makes the theme ask {LAZY_LOADERS[name]}"


def dead_links(documents: dict[str, Document], site: Path, base: str = "/") -> Iterator[str]:
    """One line for each local address without a file, or whose page lacks the anchor.

    `base` is the path at which the site is served: absolute links (only those of 404.html) begin with it.
    """
    origin = "http://site.invalid"
    for path, document in documents.items():
        for address in dict.fromkeys([*document.links, *document.loads]):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            # An address without a path means this very page; its directory would be that of another one in 404.html.
            local = base + path if not parts.path else urlsplit(urljoin(f"{origin}{base}{path}", address)).path
            if climbs_out(path, parts.path) or not local.startswith(base):
                yield f"{path}: {address} leaves the site"
                continue
            target = unquote(local.removeprefix(base))
            if (site / target).is_dir():
                target = f"{target.rstrip('/')}/index.html".lstrip("/")
            if not (site / target).is_file():
                yield f"{path}: {address} is dead: there is no {target}"
            elif parts.fragment and target in documents and not has_anchor(documents[target], target, parts.fragment):
                yield f"{path}: {address} is dead: {target} has no anchor {unquote(parts.fragment)}"


def unreadable(documents: dict[str, Document], site: Path) -> Iterator[str]:
    """One line for each page that is too large, line of code that is cut off, and picture that is white in the dark."""
    for path, document in documents.items():
        if not path.endswith(".html"):
            continue
        if document.num_bytes > MAX_PAGE_BYTES:
            yield f"{path}: {document.num_bytes:,} bytes, more than {MAX_PAGE_BYTES:,}: split it, or show less"
        columns = next(width for folder, width in CODE_COLUMNS.items() if path.startswith(folder))
        for line in document.code:
            if len(line) > columns:
                yield f"{path}: a line of code has {len(line)} characters, and {columns} are shown: {line.strip():.60}"
        for address in dict.fromkeys(document.loads):
            file = (site / path).parent / unquote(urlsplit(address).path)
            if file.suffix == ".svg" and file.is_file() and has_white_ground(file):
                yield f"{path}: {address} has a white ground, which shines in the dark palette"


def has_white_ground(drawing: Path) -> bool:
    """Whether a rectangle or a path that covers nine tenths of the drawing is filled with white."""
    root = ET.parse(drawing).getroot()
    box = [float(number) for number in re.findall(r"[-\d.]+", root.get("viewBox", ""))]
    if len(box) != 4:
        return False
    for element in root.iter():
        if not (WHITE.search(element.get("fill", "")) or WHITE.search(element.get("style", ""))):
            continue
        numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", element.get("d", ""))]
        if element.tag.endswith("rect"):
            width, height = (_length(element.get(name, ""), box[2 + i]) for i, name in enumerate(("width", "height")))
        elif element.tag.endswith("path") and len(numbers) > 5:
            width, height = (max(numbers[i::2]) - min(numbers[i::2]) for i in (0, 1))
        else:
            continue
        if width >= 0.9 * box[2] and height >= 0.9 * box[3]:
            return True
    return False


def _length(value: str, whole: float) -> float:
    number = float(re.match(r"[\d.]*", value)[0] or 0)  # type: ignore[index]
    return whole * number / 100 if value.endswith("%") else number


def climbs_out(page: str, address: str) -> bool:
    """Whether a relative address has more `..` than there are folders above the page; joining would drop them."""
    if address.startswith("/"):
        return False
    depth = page.count("/")
    for part in address.split("/"):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        if depth < 0:
            return True
    return False


def has_anchor(document: Document, path: str, fragment: str) -> bool:
    """Whether the page has this anchor; only pages are asked (`#only-light` behind an image is the theme's)."""
    if not path.endswith(".html") or fragment.startswith(":~:") or fragment == "top":
        return True
    return fragment in document.ids or unquote(fragment) in document.ids


def check(site: Path, base: str = "/") -> list[str]:
    """All problems of the site, a line each; an empty site is one (a failed build leaves an emptied folder)."""
    documents = read_site(site)
    if "index.html" not in documents:
        return [f"{site} holds no index.html: the build failed, or the site is elsewhere"]
    return [*external_loads(documents), *dead_links(documents, site, base), *unreadable(documents, site)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: problems on standard output, and 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tools.sitecheck", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("site", type=Path, help="folder that mkdocs built")
    parser.add_argument("--base", default="/", help="path at which the site is served, such as /mini-vllm/")
    options = parser.parse_args(arguments)
    base = f"/{options.base.strip('/')}/".replace("//", "/")
    problems = check(options.site, base)
    for problem in problems:
        print(problem)
    print(f"{options.site}: {len(problems)} problems", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
