"""Hook: a table that is too wide for a phone can be read there, row by row.

Below the width of a tablet such a table is stacked by the style sheet: each row is a block, its first cell the heading,
and before each other cell stands its column's name. A style sheet cannot know that name nor how wide a table would be,
so both are written into the page here: `data-stacked` on the table, `data-label` on its cells. The table of files of a
page of changes has short numbers behind long paths: it stays a table, and its paths are broken (`data-files`).
"""

import re
from html import escape, unescape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

# In pixels, on a phone 390 wide: the page's column with the margin to its right, a cell's padding, a character's width.
COLUMN, PADDING, CHARACTER, CODE_CHARACTER = 374, 19, 6.6, 6.8
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"(?P<open><t[hd](?: style=\"[^\"]*\")?)>(?P<content>.*?)(?P<close></t[hd]>)", re.DOTALL)
CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)  # a figure's (tools/figures.py)
TAG = re.compile(r"<[^>]*>")
OTHER_TAG = re.compile(r"<(?!/?code>)[^>]*>")
NUMBER = re.compile(r"[\d.,]+%?")


def on_page_content(html: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """mkdocs calls this with every page's HTML, without the theme around it."""
    return mark_files(html) if page.file.src_uri.startswith("changes/") else mark_wide_tables(html)


def mark_wide_tables(html: str) -> str:
    """The page with labels in those of its tables that a phone would show in part only."""
    return TABLE.sub(lambda match: _mark(match[0]) if least_width(match[0]) > COLUMN else match[0], html)


def mark_files(html: str) -> str:
    """A page of changes: its table stays one, and a file's path may be broken."""
    return html.replace("<table>", "<table data-files>")


def least_width(table: str) -> float:
    """About how wide a table is on a phone at least: each column as wide as the longest piece that is not broken."""
    rows = [[match["content"] for match in CELL.finditer(row)] for row in ROW.findall(table)]
    return sum(PADDING + max(_longest_piece(content) for content in column) for column in zip(*rows, strict=True))


def _longest_piece(content: str) -> float:
    """The width of the longest piece of a cell; code is one piece, as the style sheet does not break it in tables."""
    content = OTHER_TAG.sub("", re.sub(r"<br ?/?>", " ", COMMENT.sub("", content)))
    text = CODE.sub(lambda match: re.sub(r"\s", "\N{NO-BREAK SPACE}", match[0]), content)
    pieces = re.split(r"[ \n]+", text.strip())  # a no-break space holds a piece together
    return max(_width(piece) for piece in pieces)


def _width(piece: str) -> float:
    code = sum(len(unescape(TAG.sub("", match))) for match in CODE.findall(piece))
    plain = unescape(TAG.sub("", CODE.sub("", piece)))
    # A line may end between any two Chinese characters.
    widest = max((len(part) for part in re.split(r"(?<=-)|[\u3000-\uffef]", plain)), default=0)
    return code * CODE_CHARACTER + widest * CHARACTER


def _mark(table: str) -> str:
    header, *rows = ROW.findall(table)
    names = [unescape(TAG.sub("", match["content"])).strip() for match in CELL.finditer(header)]
    firsts = [TAG.sub("", match["content"]).strip() for row in rows if (match := CELL.search(row))]
    # A first cell is its row's heading, and says what it is; but a number needs its column's name.
    if not all(NUMBER.fullmatch(first) for first in firsts):
        names[0] = ""

    def label(row: re.Match[str]) -> str:
        columns = iter(names)
        return CELL.sub(lambda cell: _labelled(cell, next(columns)), row[0])

    head, end, body = table.partition("</thead>")
    return head.replace("<table>", "<table data-stacked>", 1) + end + ROW.sub(label, body)


def _labelled(cell: re.Match[str], name: str) -> str:
    content = cell["content"]
    if not (name and content.strip()):
        return cell[0]
    # One element, so that it stands in one piece beside the label.
    return f'{cell["open"]} data-label="{escape(name)}"><span>{content}</span>{cell["close"]}'
