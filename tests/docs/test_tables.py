"""A table that a phone would show in part gets what the style sheet needs to stack it; any other stays as it is."""

import pytest

from common.measuring.recipe import ROOT


def table(header: list[str], *rows: list[str]) -> str:
    """As Python-Markdown writes it, with the second column aligned."""

    def row(kind: str, cells: list[str]) -> str:
        styles = ["", ' style="text-align: right;"', *[""] * len(cells)]
        return "<tr>\n" + "".join(f"<{kind}{s}>{c}</{kind}>\n" for s, c in zip(styles, cells, strict=False)) + "</tr>"

    body = "\n".join(row("td", cells) for cells in rows)
    return f"<table>\n<thead>\n{row('th', header)}\n</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


NARROW = table(["", "one", "two"], ["a", "1", "2"])
WIDE = table(
    ["", "one &amp; all", "two"], ["<strong>a</strong>", "<strong>1</strong> <!--=x y .1f-->2<!--/-->", "x" * 60]
)


def test_a_narrow_table_is_left_as_it_is() -> None:
    from tables import mark_wide_tables

    assert mark_wide_tables(f"<p>x</p>{NARROW}<p>y</p>") == f"<p>x</p>{NARROW}<p>y</p>"


def test_in_a_wide_table_every_cell_but_the_first_says_its_columns_name() -> None:
    from tables import mark_wide_tables

    marked = mark_wide_tables(NARROW + WIDE)
    assert marked.startswith(NARROW)
    assert marked.count("<table data-stacked>") == 1
    assert "<td><strong>a</strong></td>" in marked
    assert (
        '<td style="text-align: right;" data-label="one &amp; all">'
        "<span><strong>1</strong> <!--=x y .1f-->2<!--/--></span></td>"
    ) in marked
    assert f'<td data-label="two"><span>{"x" * 60}</span></td>' in marked
    assert "<th>two</th>" in marked


def test_the_files_of_a_page_of_changes_stay_a_table_however_wide() -> None:
    from tables import mark_files

    assert mark_files(WIDE) == WIDE.replace("<table>", "<table data-files>")


def test_a_first_cell_that_is_a_number_says_its_columns_name_too() -> None:
    from tables import mark_wide_tables

    marked = mark_wide_tables(table(["streams", "text"], ["1", "x" * 60], ["1,024", ""]))
    assert '<td data-label="streams"><span>1</span></td>' in marked
    assert '<td data-label="streams"><span>1,024</span></td>' in marked
    assert '<td style="text-align: right;"></td>' in marked, "an empty cell stays empty, and is not shown"


@pytest.mark.parametrize(
    ("content", "characters"),
    [
        ("words are broken", 6),
        ("no&nbsp;break here", 8),
        ("a<br>line", 4),
        ("OpenAI-compatible", 10),
        ('<a href="a b c">link</a> to', 4),
        ("<!--=file.json a.b.c .1f-->13<!--/-->", 2),
        ("每个字都可以换行 ab", 2),
    ],
)
def test_a_column_is_as_wide_as_the_longest_piece_that_is_not_broken(content: str, characters: int) -> None:
    from tables import CHARACTER, PADDING, least_width

    one_column = table([""], [content])
    assert least_width(one_column) == pytest.approx(PADDING + characters * CHARACTER)


def test_code_in_a_cell_is_one_piece() -> None:
    from tables import CODE_CHARACTER, PADDING, least_width

    assert least_width(table([""], ["<code>a b &lt; c</code>"])) == pytest.approx(PADDING + 7 * CODE_CHARACTER)


def test_the_style_sheet_stacks_what_the_hook_marks() -> None:
    css = (ROOT / "docs" / "stylesheets" / "extra.css").read_text(encoding="utf-8")
    assert "table[data-stacked]" in css
    assert "attr(data-label)" in css
