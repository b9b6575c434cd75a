"""The Chinese README says what the English one says, as far as that can be seen without reading either.

What is the same in both languages is compared: headings, code, figures, tables, pictures, links. So a change of
README.md that README.zh-CN.md has to follow fails here. Values are another test's matter: `tests/tools/test_figures.py`
and `python -m v0_5_bench report` compare those of both files with the results.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from sources import split_fences

from tools.figures import FIGURE
from v0_5_bench.harness.report.report import BLOCK

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
# The way between the languages: only one of the two has each of these.
SWITCH = {"README.zh-CN.md", "README.md", "docs/zh/index.md"}


def prose(readme: str) -> str:
    """A README without its code and what the report puts into it."""
    text = "\n".join(text for is_code, text in split_fences(readme) if not is_code)
    return BLOCK.sub(lambda match: f"<!-- report: {match['name']} -->", text)


def headings(readme: str) -> list[str]:
    return re.findall(r"^#+(?= )", prose(readme), re.MULTILINE)


def code(readme: str) -> list[str]:
    """The fences, without the comments in them: those are in the README's language."""
    return [re.sub(r"\s+#.*", "", text) for is_code, text in split_fences(readme) if is_code]


def figures(readme: str) -> list[tuple[str, ...]]:
    return [match.group("file", "keys", "format") for match in FIGURE.finditer(readme)]


def reports(readme: str) -> list[str]:
    return [match["name"] for match in BLOCK.finditer(readme)]


def tables(readme: str) -> list[list[int]]:
    """The number of cells in each row of each table."""
    found = re.findall(r"^\|.*(?:\n\|.*)*", prose(readme), re.MULTILINE)
    return [[row.count("|") - 1 for row in table.split("\n")] for table in found]


def items(readme: str) -> list[str]:
    """The markers of lists."""
    return re.findall(r"^ *(?:-|\d+\.)(?= )", prose(readme), re.MULTILINE)


def pictures(readme: str) -> list[str]:
    return re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", prose(readme))


def names(readme: str) -> set[str]:
    """Files, flags and names of code in the sentences."""
    return set(re.findall(r"`[^`\n]+`", prose(readme)))


def links(readme: str) -> list[str]:
    """Where the links go, pictures left out."""
    return re.findall(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)", prose(readme))


@pytest.mark.parametrize("part", [headings, code, figures, reports, tables, items, pictures, names])
def test_both_readmes_have_the_same(part: Callable[[str], object]) -> None:
    assert part(ENGLISH), f"README.md has no {part.__name__}, or this test does not see them"
    assert part(CHINESE) == part(ENGLISH)


def test_links_go_to_the_same_places_in_chinese_where_there_is_a_chinese_page() -> None:
    def in_chinese(link: str) -> str:
        page = link.replace("docs/", "docs/zh/", 1)
        return page if page != link and (ROOT / page.partition("#")[0]).exists() else link

    expected = Counter(in_chinese(link) for link in links(ENGLISH) if link not in SWITCH)
    assert Counter(link for link in links(CHINESE) if link not in SWITCH) == expected


def test_each_readme_links_to_the_other_before_anything_else() -> None:
    assert links(ENGLISH)[0] == "README.zh-CN.md"
    assert links(CHINESE)[0] == "README.md"


@pytest.mark.parametrize("target", sorted({*links(CHINESE), *pictures(CHINESE)}))
def test_every_relative_link_exists(target: str) -> None:
    if not target.startswith("https://"):
        assert (ROOT / target.partition("#")[0]).exists()


def test_a_comment_of_the_code_may_be_translated_but_no_command() -> None:
    fence = '```console\n$ make demo    # {}\n$ curl -d \'{{"a": "#1"}}\' {}\n```'
    assert code(fence.format("one", "x")) == code(fence.format("一", "x"))
    assert code(fence.format("one", "x")) != code(fence.format("one", "y"))
