"""The Chinese pages say what the English ones say, as far as that can be seen without reading either, and are found.

What is the same in both languages is compared: headings, excerpts, commands and what they print, figures, numbers,
code, links. So a change of an English page that a translation has to follow fails here.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import chinese
import excerpt
import pytest
from sources import split_fences

from tools.figures import FIGURE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / "zh").rglob("*.md"))
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def english(page: str) -> str:
    return page.removeprefix("zh/")


def prose(page: str) -> str:
    """A page without its code and its front matter."""
    text = "\n".join(text for is_code, text in split_fences((DOCS / page).read_text(encoding="utf-8")) if not is_code)
    return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)


def code(page: str) -> list[str]:
    """The fences of a page; the comments in those of a shell are in the page's language."""
    fences = [text for is_code, text in split_fences((DOCS / page).read_text(encoding="utf-8")) if is_code]
    return [re.sub(r"\s+#.*", "", text) if text.startswith("```sh") else text for text in fences]


def links(page: str) -> Iterator[str]:
    """Where the links of a page go, as if there were one language."""
    for match in LINK.finditer(prose(page)):
        path, mark, anchor = match["target"].partition("#")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        yield english(place) + mark + anchor


def numbers(page: str) -> Counter[str]:
    """The numbers in the sentences of a page, without the figures and the links' addresses."""
    return Counter(NUMBER.findall(re.sub(r"\]\([^)]*\)", "]", FIGURE.sub("", prose(page)))))


def lines(page: str) -> Counter[str]:
    """How many headings of each level a page has, rows of tables, items of lists, and admonitions."""
    return Counter(re.findall(r"^ *(#+|\||-|\d+\.|\?\?\?|!!!) ", prose(page), re.MULTILINE))


def test_there_are_pages() -> None:
    assert {"zh/index.md", *(f"zh/milestones/v0_{number}.md" for number in range(1, 6))} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_parts_of_its_english_page(page: str) -> None:
    assert lines(page) == lines(english(page))
    levels = [re.findall(r"^#+(?= )", prose(name), re.MULTILINE) for name in (page, english(page))]
    assert levels[0] == levels[1]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_excerpts_and_drawings_of_its_english_page(page: str) -> None:
    directives = [re.findall(r"^ *--\w+-- .+$", prose(name), re.MULTILINE) for name in (page, english(page))]
    assert directives[0] == directives[1]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_commands_and_outputs_of_its_english_page(page: str) -> None:
    assert code(page) == code(english(page))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_figures_of_its_english_page(page: str) -> None:
    figures = [Counter(match[0] for match in FIGURE.finditer(prose(name))) for name in (page, english(page))]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_numbers_of_its_english_page(page: str) -> None:
    missing = numbers(english(page)) - numbers(page)  # where English has a word Chinese may have digits
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_the_code_that_its_english_page_names(page: str) -> None:
    names = [set(re.findall(r"`[^`\n]+`", FIGURE.sub("", prose(name)))) for name in (page, english(page))]
    assert names[0] == names[1]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_links_where_its_english_page_links_and_each_to_the_other(page: str) -> None:
    assert Counter(links(page)) == Counter(links(english(page)))
    for here, there in ((page, english(page)), (english(page), page)):
        assert f"]({posixpath.relpath(there, posixpath.dirname(here) or '.')})" in prose(here)


def test_a_page_without_a_counterpart_has_the_home_for_it() -> None:
    sources = ["index.md", "design.md", "milestones/v0_1.md", "zh/index.md", "zh/milestones/v0_1.md", "zh/only.md"]
    sources += ["blog/a.md", "blog/a.zh.md"]
    assert chinese.versions("milestones/v0_1.md", sources) == ("milestones/v0_1.md", "zh/milestones/v0_1.md")
    assert chinese.versions("zh/milestones/v0_1.md", sources) == ("milestones/v0_1.md", "zh/milestones/v0_1.md")
    assert chinese.versions("blog/a.md", sources) == ("blog/a.md", "blog/a.zh.md")
    assert chinese.versions("blog/a.zh.md", sources) == ("blog/a.md", "blog/a.zh.md")
    assert chinese.versions("design.md", sources) == ("design.md", "zh/index.md")
    assert chinese.versions("zh/only.md", sources) == ("index.md", "zh/only.md")


class FakePage(SimpleNamespace):
    """What the hook reads of a page."""

    is_page = True

    def __init__(self, source: str) -> None:
        url = source.removesuffix("index.md").replace(".md", "/")
        super().__init__(file=SimpleNamespace(src_uri=source), url=url, previous_page=None, next_page=None)


def test_each_page_has_its_language_and_a_switch_to_the_other() -> None:
    sources = ("index.md", "blog/a.md", "blog/a.zh.md", "design.md", "zh/index.md", "zh/milestones/v0_1.md")
    pages = [FakePage(source) for source in sources]
    blog, section = (SimpleNamespace(is_page=False, children=part) for part in (pages[1:3], pages[4:]))
    nav = SimpleNamespace(pages=pages, items=[pages[0], blog, pages[3], section])
    config = SimpleNamespace(theme={}, extra={})
    seen = []
    for page in pages:
        context = chinese.on_page_context({"nav": nav}, page, config, nav)
        switch = [alternate["link"] for alternate in config.extra["alternate"]]
        seen.append((config.theme["language"], switch, context["nav"].items.index(section)))
    assert seen == [
        ("en", ["./", "zh/"], 3),
        ("en", ["blog/a/", "blog/a.zh/"], 3),
        ("zh", ["blog/a/", "blog/a.zh/"], 0),
        ("en", ["design/", "zh/"], 3),
        ("zh", ["./", "zh/"], 0),
        ("zh", ["./", "zh/milestones/v0_1/"], 0),
    ]
    assert (pages[1].next_page, pages[3].previous_page, pages[3].next_page) == (pages[3], pages[1], None)
    assert (pages[2].previous_page, pages[2].next_page, pages[4].previous_page) == (None, pages[4], pages[2])
    head = '<head>\n  <link rel="alternate" href="zh/" hreflang="zh">\n  <link rel="icon" href="i.png">'
    assert chinese.on_post_page(head, pages[0], config) == '<head>\n  <link rel="icon" href="i.png">'


def test_an_excerpt_on_a_chinese_page_has_a_chinese_title(tree: Path) -> None:
    text = excerpt.expand("--excerpt-- v0_1_first/llm.py LLM.generate", "zh/milestones/v0_1.md", tree)
    assert 'title="v0_1_first/llm.py，第 14 至 15 行"' in text
    assert "[v0_1_first/llm.py 全文](../../changes/v0_1/llm.py.md)" in text
    text = excerpt.expand("--excerpt-- v0_2_second/llm.py LIMIT", "zh/index.md", tree)
    assert 'title="v0_2_second/llm.py，第 8 行"' in text
    assert "[v0_2_second/llm.py 的改动](../changes/v0_2.md#llm-py)" in text


def test_the_search_ends_words_where_jieba_and_chinese_punctuation_do() -> None:
    [separator] = re.findall(r"^ +separator: '(.+)'$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    text = "\u200bKV 缓存\u200b，\u200b块表\u200b：v0.3（\u200b抢占\u200b）"
    assert [word for word in re.split(separator, text) if word] == ["KV", "缓存", "块表", "v0.3", "抢占"]


def test_the_loop_that_cuts_a_query_is_found_in_the_themes_script() -> None:
    theme = Path(pytest.importorskip("material").__file__).parent / "templates"
    [worker] = theme.glob("assets/javascripts/workers/search.*.js")
    script = worker.read_text(encoding="utf-8")
    assert len(chinese.mend(script)) == len(script) + 1, "does the search find 批处理? Then the mending may go"
    assert chinese.mend(chinese.mend(script)) == chinese.mend(script)


def test_the_words_of_the_field_are_words_for_the_search() -> None:
    jieba = pytest.importorskip("jieba")
    chinese.on_config(SimpleNamespace())
    text = "请求的块表和槽位在连续批处理里分块预填充后被抢占再重算"
    assert {"块表", "槽位", "批处理", "预填充", "抢占", "重算"} <= set(jieba.cut(text))
    texts = "".join(prose(page) for page in PAGES)
    assert [word for word in chinese.WORDS if word not in texts] == [], "words that no page has"
