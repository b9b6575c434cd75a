"""Excerpts by symbol: what is cut out, what is refused. And the files included in a page, with their links."""

import re
from pathlib import Path

import excerpt
import includes
import pytest
from sources import SourceError

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""A module."""
import functools

LIMIT: int = 16  # tokens
LOW, (HIGH, _) = 1, (2, 3)
TABLE = {
    "a": 1,
}
TABLE["b"] = 2

if LIMIT > 1:
    def chosen():
        return 1


@functools.lru_cache(
    maxsize=None
)
def cached(x):
    """Has ``` in it.
```
    """
    return x


class Cache:
    size: int = 0

    @property
    def free(self):
        text = """
left
"""
        return text

    async def fetch(self):
        self.LIMIT = 1
        pass

    class Inner:
        def deep(self): ...


def twice(): ...
def twice(): ...
'''


def cut(symbol: str) -> tuple[int, int, str]:
    return excerpt.cut(SOURCE, symbol, "a.py")


@pytest.mark.parametrize(
    ("symbol", "first", "last", "text"),
    [
        ("LIMIT", 4, 4, "LIMIT: int = 16  # tokens"),
        ("HIGH", 5, 5, "LOW, (HIGH, _) = 1, (2, 3)"),
        ("TABLE", 6, 8, 'TABLE = {\n    "a": 1,\n}'),
        ("chosen", 12, 13, "def chosen():\n    return 1"),
        ("Cache.size", 27, 27, "size: int = 0"),
        ("Cache.fetch", 36, 38, "async def fetch(self):\n    self.LIMIT = 1\n    pass"),
        ("Cache.Inner.deep", 41, 41, "def deep(self): ..."),
    ],
)
def test_symbol_is_cut_out_and_dedented(symbol: str, first: int, last: int, text: str) -> None:
    assert cut(symbol) == (first, last, text)


def test_a_piece_runs_from_the_line_with_the_first_text_to_the_next_with_the_second(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)

    def piece(*texts: str, page: str = "lesson.md") -> str:
        return excerpt.piece(tmp_path, "a.py", "Cache", texts, page)

    assert piece("async def", "pass") == (
        '```python title="a.py, lines 36 to 38"\nasync def fetch(self):\n    self.LIMIT = 1\n    pass\n```\n'
    )
    for page in ("zh/lesson.md", "blog/post.zh.md"):
        assert piece("self.LIMIT", page=page) == '```python title="a.py，第 37 行"\nself.LIMIT = 1\n```\n'
    with pytest.raises(SourceError, match=r"a\.py Cache: 'def ' is in 3 lines"):
        piece("def ", "pass")
    with pytest.raises(SourceError, match=r"a\.py Cache: 'gone' is in 0 lines"):
        piece("gone")
    with pytest.raises(SourceError, match=r"a\.py Cache: 'size' is in no line from line 36 on"):
        piece("async def", "size")


def test_a_directive_names_a_piece_by_two_texts_at_most(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    page = excerpt.expand("--excerpt-- a.py Cache | self.LIMIT | pass", "lesson.md", tmp_path)
    assert page.startswith('```python title="a.py, lines 37 to 38"\nself.LIMIT = 1\npass\n```')
    for wrong in ("a.py | pass", "a.py Cache | a | b | c", "a.py Cache x"):
        with pytest.raises(SourceError, match="an excerpt is"):
            excerpt.expand(f"--excerpt-- {wrong}", "lesson.md", tmp_path)


def test_decorators_belong_to_the_symbol() -> None:
    first, last, text = cut("cached")
    assert (first, last) == (16, 23)
    assert text.startswith("@functools.lru_cache(\n    maxsize=None\n)\ndef cached(x):\n")


def test_text_left_of_the_symbol_stays() -> None:
    assert cut("Cache.free")[2] == '@property\ndef free(self):\n    text = """\nleft\n"""\n    return text'


def test_form_feed_does_not_shift_the_lines() -> None:
    assert excerpt.cut('x = "\\f"\n\f\ndef f():\n    pass\n', "f", "a.py") == (3, 4, "def f():\n    pass")


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("missing", "missing is not there"),
        ("Cache.missing", "Cache.missing: missing is not there"),
        ("LIMIT.real", "real is not there"),
        ("functools", "functools is not there"),
        ("twice", "is there 2 times, in lines 44, 45"),
    ],
)
def test_symbol_that_is_not_there_once_is_an_error(symbol: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        cut(symbol)


C_SOURCE = """/* add( is named here, too */
static inline int add(int a,
                      int b) {
    if (a) {
        return add(0, a + b);
    }
    return b;
}

void use(void) { add(1, 2); }
int twice(int);
int twice(int a) {
    return 2 * a;
}
"""


def test_a_function_in_c_runs_from_the_line_with_its_name_to_the_brace_at_the_margin() -> None:
    lines = C_SOURCE.split("\n")
    assert excerpt.cut(C_SOURCE, "add", "x.c") == (2, 8, "\n".join(lines[1:8]))
    for symbol, times in (("twice", 2), ("none", 0)):
        with pytest.raises(SourceError, match=f"x.c {symbol}: the function is there {times} times"):
            excerpt.cut(C_SOURCE, symbol, "x.c")


def test_page_gets_fence_title_and_link(tree: Path) -> None:
    text = excerpt.expand("Before.\n\n--excerpt-- v0_1_first/llm.py LLM.generate\n\nAfter.", "milestones/v0_1.md", tree)
    assert text == (
        'Before.\n\n```python title="v0_1_first/llm.py, lines 14 to 15"\n'
        "def generate(self, prompt: str) -> str:\n    return prompt\n```\n\n"
        "[v0_1_first/llm.py in full](../changes/v0_1/llm.py.md){ .excerpt-link }\n\n\nAfter."
    )


def test_link_leads_to_the_diff_of_a_changed_file_and_none_to_what_is_not_shown(tree: Path) -> None:
    changed = excerpt.expand("--excerpt-- v0_2_second/llm.py LIMIT", "index.md", tree)
    assert "[what changed in v0_2_second/llm.py](changes/v0_2.md#llm-py)" in changed
    same = excerpt.expand("--excerpt-- v0_2_second/__init__.py", "index.md", tree)
    assert "[v0_2_second/__init__.py in full](changes/v0_1/__init__.py.md)" in same
    assert "](" not in excerpt.expand("--excerpt-- common/errors.py ModelError", "index.md", tree)


def test_fence_is_longer_than_the_backticks_in_the_excerpt(tree: Path) -> None:
    text = excerpt.expand("--excerpt-- v0_1_first/llm.py", "index.md", tree)
    assert text.startswith('````python title="v0_1_first/llm.py"\n')
    assert "\n````\n" in text


def test_indented_directive_gives_an_indented_fence(tree: Path) -> None:
    text = excerpt.expand("- item\n\n    --excerpt-- v0_1_first/llm.py LIMIT", "index.md", tree)
    assert '    ```python title="v0_1_first/llm.py, line 8"\n    LIMIT = 16\n    ```\n' in text


def test_directive_in_a_fence_or_a_sentence_stays(tree: Path) -> None:
    text = "```text\n--excerpt-- gone.py x\n```\n\nWrite --excerpt-- gone.py x so.\n\n~~~\n```\n--excerpt-- a\n~~~"
    assert excerpt.expand(text, "index.md", tree) == text


@pytest.mark.parametrize(
    ("directive", "message"),
    [
        ("--excerpt-- v0_1_first/lost.py", r"v0_1_first/lost\.py is no file"),
        ("--excerpt-- ../secret.py", "is no file of the repository"),
        ("--excerpt-- v0_1_first/llm.py LLM.lost", "lost is not there"),
        ("--excerpt--", "an excerpt is"),
        ("--excerpt-- a b c", "an excerpt is"),
        ("--excerpt-- v0_2_second/web/index.html p", "is no Python"),
    ],
)
def test_lost_file_or_symbol_is_an_error(tree: Path, directive: str, message: str) -> None:
    (tree.parent / "secret.py").write_text("x = 1\n")
    with pytest.raises(SourceError, match=message):
        excerpt.expand(directive, "index.md", tree)


def included(tree: Path, text: str) -> str:
    (tree / "design.md").write_text(text, encoding="utf-8")
    (tree / "NOTES.md").write_text("# Notes\n")
    return includes.expand("--include-- design.md", "design.md", tree).rstrip("\n")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[notes](NOTES.md#paging)", "[notes](notes.md#paging)"),
        ("[a lesson](docs/milestones/v0_1.md#run-it)", "[a lesson](milestones/v0_1.md#run-it)"),
        ("[folder](v0_2_second/)", "[folder](milestones/v0_2.md)"),
        ("[new](v0_2_second/blocks.py#L1)", "[new](changes/v0_2/blocks.py.md)"),
        ("[same](v0_2_second/__init__.py)", "[same](changes/v0_1/__init__.py.md)"),
        ("[`errors.py`\nthere](common/errors.py)", "`errors.py`\nthere (`common/errors.py`)"),
        ("[`common/errors.py`](common/errors.py)", "`common/errors.py`"),
        ("[vLLM](https://docs.vllm.ai/) [here](#below)", "[vLLM](https://docs.vllm.ai/) [here](#below)"),
        ("`[code](nowhere.md)`", "`[code](nowhere.md)`"),
        ("```\n[code](nowhere.md)\n```", "```\n[code](nowhere.md)\n```"),
        ("[n]: NOTES.md", "[n]: notes.md"),
    ],
)
def test_links_of_an_included_file_are_turned(tree: Path, written: str, shown: str) -> None:
    assert included(tree, written) == shown


@pytest.mark.parametrize(
    "written", ["[gone](nowhere.md)", "[out](../x.md)", "![not shown](common/errors.py)", "[n]: common/errors.py"]
)
def test_dead_link_of_an_included_file_is_an_error(tree: Path, written: str) -> None:
    with pytest.raises(SourceError):
        included(tree, written)


def test_drawing_becomes_part_of_the_page(tree: Path) -> None:
    (tree / "a.svg").write_text('<?xml version="1.0"?>\n<svg viewBox="0 0 1 1"><title>a_b_c</title></svg>\n')
    text = includes.expand("--include-- a.svg", "index.md", tree)
    assert text == '<figure class="drawing">\n<svg viewBox="0 0 1 1"><title>a_b_c</title></svg>\n</figure>\n'


SECTIONS = """# All

Before.

## One

First, [d](design.md#x).

### Below

```text
## Two
```

## Two

Second.

# End
"""


@pytest.mark.parametrize(
    ("heading", "shown"),
    [
        ("One", "# One\n\nFirst, [d](../design.md#x).\n\n## Below\n\n```text\n## Two\n```\n"),
        ("Below", "# Below\n\n```text\n## Two\n```\n"),
        ("Two", "# Two\n\nSecond.\n"),
    ],
)
def test_section_of_a_file_is_included_by_its_heading(tree: Path, heading: str, shown: str) -> None:
    (tree / "NOTES.md").write_text(SECTIONS, encoding="utf-8")
    (tree / "design.md").write_text("# Design\n", encoding="utf-8")
    assert includes.expand(f"--include-- NOTES.md {heading}", "notes/one.md", tree) == shown


@pytest.mark.parametrize(("heading", "times"), [("Three", 0), ("one", 0), ("Twice", 2)])
def test_section_that_is_not_there_once_is_an_error(tree: Path, heading: str, times: int) -> None:
    (tree / "NOTES.md").write_text(f"{SECTIONS}\n## Twice\n\n## Twice\n", encoding="utf-8")
    with pytest.raises(SourceError, match=rf"NOTES.md has the heading '{heading}' {times} times"):
        includes.expand(f"--include-- NOTES.md {heading}", "notes/one.md", tree)


def test_every_section_of_the_notes_has_its_page() -> None:
    headings = [line[3:] for line in (ROOT / "NOTES.md").read_text(encoding="utf-8").split("\n") if line[:3] == "## "]
    pages = [ROOT / "docs" / "notes.md", *(ROOT / "docs" / "notes").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert sorted(re.findall(r"^--include-- NOTES\.md (.+)$", text, re.MULTILINE)) == sorted(headings)
