"""The generated pages of changes: what they show, that they are repeatable, and that nothing in a source breaks out."""

import re
import subprocess
from pathlib import Path

import diffs
import pytest
from sources import SourceError

from tools.milestones import load_ledger


def page(root: Path, number: int) -> str:
    milestones = load_ledger(root)
    return diffs.render(root, milestones[number], milestones[number - 1] if number else None)


def test_first_milestone_shows_every_file_whole(tree: Path) -> None:
    text = page(tree, 0)
    assert "# Source of v0.1\n" in text
    assert "| [`llm.py`](#llm-py) | new | +15 | 0 |" in text
    assert "    x = 1\n    y = 2\n" in text
    assert '???+ new "whole file, 15 lines"' in text
    assert "The file is empty." in text  # __init__.py


def test_second_milestone_shows_diffs_new_files_and_names_the_rest(tree: Path) -> None:
    text = page(tree, 1)
    assert "# v0.1 → v0.2\n" in text
    assert "diff -ru v0_1_first v0_2_second" in text
    assert "[the lesson](../milestones/v0_2.md)" in text
    assert "| [`llm.py`](#llm-py) | changed | +2 | −1 |" in text
    assert '???+ changed "diff, +2 −1 lines"' in text
    assert "| [`blocks.py`](#blocks-py) | new | +1 | 0 |" in text
    assert "| `gone.py` | dropped | 0 | −2 |" in text
    assert "| **all** | | **+4** | **−3** |" in text
    assert "Unchanged: `__init__.py`." in text
    assert "    ```python\n    BLOCK_SIZE = 16\n    ```" in text
    assert "    ```html\n    <p>Hello</p>\n" in text
    assert "    -        return prompt\n    +        text = prompt.upper()\n    +        return text\n" in text
    assert "x = 1" not in text


def test_pages_are_left_out_of_the_search(tree: Path) -> None:
    assert page(tree, 1).startswith("---\ntitle: v0.1 → v0.2\nsearch:\n  exclude: true\n")


def test_output_is_deterministic(tree: Path) -> None:
    assert page(tree, 0) == page(tree, 0)
    assert page(tree, 1) == page(tree, 1)


def test_fence_is_longer_than_the_backticks_in_the_source(tree: Path) -> None:
    assert "    ````python\n" in page(tree, 0)  # llm.py has a fence of three in its docstring


def test_diff_can_be_applied(tmp_path: Path) -> None:
    """Over 200 lines with many equal ones: `difflib` would take those for noise."""
    old = "".join(f"def f{n}():\n    return 1\n\n" for n in range(120))
    new = old.replace("def f7():", "def g7():").replace(
        "def f99():\n    return 1\n", "def f99():\n    return 2\n    # end\n"
    )
    new = new.rstrip("\n")  # and no newline at the end
    diff, added, removed = diffs.unified_diff(old, new, "a.py", "a.py")
    (tmp_path / "a.py").write_text(old)
    subprocess.run(["git", "apply", "-p0"], cwd=tmp_path, input=diff, text=True, check=True)
    assert (tmp_path / "a.py").read_text() == new
    assert (added, removed) == (4, 4)
    assert "\\ No newline at end of file" in diff


def test_diff_of_equal_texts_has_no_hunks() -> None:
    assert diffs.unified_diff("a\n", "a\n", "x", "y") == ("--- x\n+++ y\n", 0, 0)


def test_hunk_names_its_definition() -> None:
    old = "class A:\n    def f(self):\n" + "".join(f"        x{n} = 1\n" for n in range(9))
    diff, _, _ = diffs.unified_diff(old, old.replace("x8 = 1", "x8 = 2"), "a", "b")
    assert re.search(r"^@@ -8,4 \+8,4 @@ def f\(self\):$", diff, re.MULTILINE)


def test_form_feed_ends_no_line() -> None:
    _, added, removed = diffs.unified_diff("a\fb\n", "a\fc\n", "x", "y")
    assert (added, removed) == (1, 1)


def test_binary_file_is_named_not_shown(tree: Path) -> None:
    (tree / "v0_2_second" / "blocks.py").write_bytes(b"\x00\x01\xff")
    assert "(not text: 3 bytes, SHA-256 " in page(tree, 1)


def test_listed_file_that_is_missing_is_an_error(tree: Path) -> None:
    (tree / "v0_2_second" / "blocks.py").unlink()
    with pytest.raises(SourceError, match=r"v0_2_second/blocks\.py is no file"):
        page(tree, 1)
