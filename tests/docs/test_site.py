"""The real site builds without a warning and passes both gates; a page that names something lost ends the build."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.milestones import load_ledger
from tools.sitecheck import check

ROOT = Path(__file__).resolve().parents[2]
Build = Callable[..., subprocess.CompletedProcess[str]]


def test_site_of_this_repository_is_sound(build: Build, tmp_path: Path) -> None:
    site = tmp_path / "site"
    result = build(ROOT, site)
    assert result.returncode == 0, result.stderr
    assert check(site) == []
    python = [file.relative_to(site) for file in site.rglob("*.py") if file.is_file()]
    assert {file.parts[0] for file in python} == {"playground"}, "the hooks are no part of the site"
    assert not list(site.rglob("__pycache__"))


def test_home_page_says_which_milestones_exist() -> None:
    rows = [line for line in (ROOT / "docs" / "index.md").read_text(encoding="utf-8").split("\n") if line[:2] == "| "]
    done = [row for row in rows if "milestones/v0_" in row]
    assert len(done) == len(load_ledger(ROOT))
    assert not [row for row in done if "planned" in row]


def test_made_up_site_shows_diffs_and_excerpts(build: Build, tree: Path) -> None:
    site = tree / "site"
    result = build(tree, site)
    assert result.returncode == 0, result.stderr
    assert check(site) == []
    diff = (site / "changes" / "v0_2" / "index.html").read_text(encoding="utf-8")
    assert 'class="language-diff highlight"' in diff
    assert '<h2 id="llm-py">' in diff
    lesson = (site / "milestones" / "v0_1" / "index.html").read_text(encoding="utf-8")
    assert "v0_1_first/llm.py, lines 14 to 15" in lesson
    assert 'href="../../changes/v0_1/llm.py/"' in lesson
    whole = (site / "changes" / "v0_1" / "llm.py" / "index.html").read_text(encoding="utf-8")
    assert whole.count("a fence inside the source") == 1
    assert "```" in whole, "the docstring's fence is text of the source, not Markdown"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--excerpt-- v0_1_first/llm.py LLM.lost", "v0_1_first/llm.py LLM.lost: lost is not there"),
        ("--excerpt-- v0_1_first/lost.py", "v0_1_first/lost.py is no file"),
        ("--include-- lost.md", "lost.md is no file"),
        ("[x](../changes/v0_2.md#lost-py)", "does not contain an anchor '#lost-py'"),
        ("[x](lost.md)", "lost.md"),
    ],
)
def test_page_that_names_something_lost_ends_the_build(build: Build, tree: Path, line: str, message: str) -> None:
    with (tree / "docs" / "milestones" / "v0_1.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{line}\n")
    result = build(tree, tree / "site")
    assert result.returncode != 0
    assert message in result.stderr
    assert "milestones/v0_1.md" in result.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('predecessor = "v0_1_first"', 'predecessor = "v0_0_lost"', "v0_0_lost"),
        ('"blocks.py"', '"lost.py"', "v0_2_second/lost.py is no file"),
        ("[tool.milestones", "[tool.other", "no [tool.milestones]"),
    ],
)
def test_ledger_that_is_wrong_ends_the_build(build: Build, tree: Path, old: str, new: str, message: str) -> None:
    ledger = tree / "pyproject.toml"
    ledger.write_text(ledger.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    result = build(tree, tree / "site")
    assert result.returncode != 0
    assert message in result.stderr
