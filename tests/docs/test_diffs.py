"""The generated pages of changes: what they show, that they are repeatable, and that nothing in a source breaks out."""

import re
import subprocess
from pathlib import Path

import diffs
import pytest
from comparison import ALIKE, Move, likeness, moved_files, unified_diff
from sources import Place, SourceError, place_of

from tools.milestones import load_ledger


def page(root: Path, number: int) -> str:
    milestones = load_ledger(root)
    return diffs.render(root, milestones[number], milestones[number - 1] if number else None)


def file_pages(root: Path, number: int) -> dict[str, str]:
    return dict(diffs.file_pages(root, load_ledger(root)[number]))


def test_first_milestone_has_a_page_for_every_file(tree: Path) -> None:
    text = page(tree, 0)
    assert "# Source of v0.1\n" in text
    assert "| [`llm.py`](v0_1/llm.py.md) | new | +15 | 0 |" in text
    assert "LIMIT = 16" not in text
    pages = file_pages(tree, 0)
    assert len(pages) == len(load_ledger(tree)[0].new)
    whole = pages["changes/v0_1/llm.py.md"]
    assert "# `llm.py`\n\nNew in `v0_1_first`, 15 lines. All changes: [Source of v0.1](../v0_1.md).\n" in whole
    assert (tree / "v0_1_first" / "llm.py").read_text() in whole
    assert "The file is empty." in pages["changes/v0_1/__init__.py.md"]


def test_second_milestone_shows_diffs_new_files_and_names_the_rest(tree: Path) -> None:
    text = page(tree, 1)
    assert "# v0.1 → v0.2\n" in text
    assert "diff -ru v0_1_first v0_2_second" in text
    assert "[the lesson](../milestones/v0_2.md)" in text
    assert "| [`llm.py`](#llm-py) | changed | +2 | −1 |" in text
    assert '???+ changed "diff, +2 −1 lines"' in text
    assert "| [`blocks.py`](v0_2/blocks.py.md) | new | +1 | 0 |" in text
    assert "| `gone.py` | dropped | 0 | −2 |" in text
    assert "| **all** | | **+4** | **−3** |" in text
    assert "Unchanged: `__init__.py`." in text
    assert "\n```python\nBLOCK_SIZE = 16\n```" in file_pages(tree, 1)["changes/v0_2/blocks.py.md"]
    assert "\n```html\n<p>Hello</p>\n" in file_pages(tree, 1)["changes/v0_2/web/index.html.md"]
    assert "+++" not in text.replace("???+", "")  # the names of the files would be coloured as changes
    assert "    -        return prompt\n    +        text = prompt.upper()\n    +        return text\n" in text
    assert "x = 1" not in text


def test_pages_are_left_out_of_the_search(tree: Path) -> None:
    assert page(tree, 1).startswith("---\ntitle: v0.1 → v0.2\nsearch:\n  exclude: true\n")
    assert all("\nsearch:\n  exclude: true\n" in text for text in file_pages(tree, 1).values())


def test_output_is_deterministic(tree: Path) -> None:
    assert page(tree, 0) == page(tree, 0)
    assert page(tree, 1) == page(tree, 1)


def test_fence_is_longer_than_the_backticks_in_the_source(tree: Path) -> None:
    assert (
        "\n````python\n" in file_pages(tree, 0)["changes/v0_1/llm.py.md"]
    )  # llm.py has a fence of three in its docstring


def test_diff_can_be_applied(tmp_path: Path) -> None:
    """Over 200 lines with many equal ones: `difflib` would take those for noise."""
    old = "".join(f"def f{n}():\n    return 1\n\n" for n in range(120))
    new = old.replace("def f7():", "def g7():").replace(
        "def f99():\n    return 1\n", "def f99():\n    return 2\n    # end\n"
    )
    new = new.rstrip("\n")  # and no newline at the end
    diff, added, removed = unified_diff(old, new, "a.py", "a.py")
    (tmp_path / "a.py").write_text(old)
    subprocess.run(["git", "apply", "-p0"], cwd=tmp_path, input=diff, text=True, check=True)
    assert (tmp_path / "a.py").read_text() == new
    assert (added, removed) == (4, 4)
    assert "\\ No newline at end of file" in diff


def test_diff_of_equal_texts_has_no_hunks() -> None:
    assert unified_diff("a\n", "a\n", "x", "y") == ("--- x\n+++ y\n", 0, 0)


def test_hunk_names_its_definition() -> None:
    old = "class A:\n    def f(self):\n" + "".join(f"        x{n} = 1\n" for n in range(9))
    diff, _, _ = unified_diff(old, old.replace("x8 = 1", "x8 = 2"), "a", "b")
    assert re.search(r"^@@ -8,4 \+8,4 @@ def f\(self\):$", diff, re.MULTILINE)


def test_form_feed_ends_no_line() -> None:
    _, added, removed = unified_diff("a\fb\n", "a\fc\n", "x", "y")
    assert (added, removed) == (1, 1)


def test_binary_file_is_named_not_shown(tree: Path) -> None:
    (tree / "v0_2_second" / "blocks.py").write_bytes(b"\x00\x01\xff")
    assert "(not text: 3 bytes, SHA-256 " in file_pages(tree, 1)["changes/v0_2/blocks.py.md"]


def test_listed_file_that_is_missing_is_an_error(tree: Path) -> None:
    (tree / "v0_2_second" / "blocks.py").unlink()
    with pytest.raises(SourceError, match=r"v0_2_second/blocks\.py is no file"):
        page(tree, 1)


TEN = "".join(f"line {number}\n" for number in range(10))


@pytest.fixture
def moved(tree: Path) -> Path:
    """In the second milestone measurements/ is gone, but two of its files went to harness/; web/ is a folder."""
    files = {
        "v0_1_first/measurements/decode.py": TEN,
        "v0_1_first/measurements/plot.py": TEN.replace("line", "row"),
        "v0_1_first/measurements/old.py": "x = 1\n",
        "v0_1_first/measurements/older.py": "x = 2\n",
        "v0_2_second/harness/decode.py": TEN,
        "v0_2_second/harness/plots.py": TEN.replace("line", "row").replace("row 9\n", "row nine\nrow ten\n"),
        "v0_1_first/web/index.html": "<p>Hello</p>\n",
        "v0_1_first/web/app.js": "1;\n",
        "v0_2_second/web/app.js": "1;\n",
    }
    for path, text in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    edit_ledger(tree, 'new = ["__init__.py", ', 'new = ["measurements/", "web/", "__init__.py", ')
    edit_ledger(tree, 'new = ["blocks.py", "web/index.html"]', 'new = ["blocks.py", "harness/"]')
    edit_ledger(tree, 'same = ["__init__.py"]', 'same = ["__init__.py", "web/"]')
    edit_ledger(tree, 'dropped = ["gone.py"]', 'dropped = ["gone.py", "measurements/"]')
    return tree


def edit_ledger(tree: Path, old: str, new: str) -> None:
    ledger = tree / "pyproject.toml"
    text = ledger.read_text()
    assert text.count(old) == 1
    ledger.write_text(text.replace(old, new))


def test_moved_file_that_is_equal_has_a_row_and_no_body(moved: Path) -> None:
    text = page(moved, 1)
    assert "| `harness/decode.py` | moved from `measurements/decode.py` | 0 | 0 |" in text
    assert "## `harness/decode.py`" not in text


def test_moved_file_that_is_changed_is_a_diff_against_its_old_path(moved: Path) -> None:
    text = page(moved, 1)
    row = "| [`harness/plots.py`](#harness-plots-py) | changed, moved from `measurements/plot.py` | +2 | −1 |"
    assert row in text
    assert '## `harness/plots.py` { #harness-plots-py }\n\n???+ changed "diff, +2 −1 lines"\n' in text
    assert "    -row 9\n    +row nine\n    +row ten\n" in text


def test_dropped_folder_is_one_row_without_the_files_that_were_moved(moved: Path) -> None:
    text = page(moved, 1)
    assert "| `measurements/` | dropped | 0 | −2 |" in text
    assert text.count("measurements/old") == 0


def test_folder_that_got_other_files_is_shown_file_by_file(moved: Path) -> None:
    (moved / "v0_2_second" / "measurements").mkdir()
    (moved / "v0_2_second" / "measurements" / "blocks.py").write_text("y = 1\n")
    edit_ledger(moved, 'new = ["blocks.py", "harness/"]', 'new = ["blocks.py", "harness/", "measurements/"]')
    text = page(moved, 1)
    assert "| `measurements/old.py` | dropped | 0 | −1 |\n| `measurements/older.py` | dropped | 0 | −1 |" in text
    assert "| [`measurements/blocks.py`](v0_2/measurements/blocks.py.md) | new | +1 | 0 |" in text
    assert "`measurements/`" not in text


def test_folder_that_is_the_same_is_one_name(moved: Path) -> None:
    assert "Unchanged: `__init__.py`, `web/`.\n" in page(moved, 1)
    (moved / "v0_2_second" / "web" / "app.js").write_text("2;\n")
    edit_ledger(moved, 'changed = ["llm.py"]', 'changed = ["llm.py", "web/app.js"]')
    assert "Unchanged: `__init__.py`, the rest of `web/`.\n" in page(moved, 1)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("harness/decode.py", Place("changes/v0_1/measurements/decode.py.md", whole=True)),
        ("harness/plots.py", Place("changes/v0_2.md#harness-plots-py", whole=False)),
        ("web/index.html", Place("changes/v0_1/web/index.html.md", whole=True)),
        ("blocks.py", Place("changes/v0_2/blocks.py.md", whole=True)),
        ("measurements/old.py", None),
    ],
)
def test_place_of_a_moved_file_is_where_its_text_is_shown(moved: Path, path: str, place: Place | None) -> None:
    assert place_of(moved, f"v0_2_second/{path}", load_ledger(moved)) == place


def moves_of(folder: Path, new: dict[str, str], dropped: dict[str, str]) -> dict[str, Move]:
    for name, files in (("here", new), ("before", dropped)):
        for path, text in files.items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text)
    return moved_files(folder / "here", list(new), folder / "before", list(dropped))


def test_equal_file_is_preferred_to_one_of_the_same_name_and_that_to_one_more_alike(tmp_path: Path) -> None:
    edited, more_edited = TEN.replace("line 9", "nine"), TEN.replace("line 9", "nine").replace("line 8", "eight")
    new = {"new/a.py": TEN, "new/b.py": edited + "end\n"}
    assert moves_of(tmp_path, new, {"old/a.py": edited, "old/b.py": more_edited, "old/c.py": TEN}) == {
        "new/a.py": Move("old/c.py", is_equal=True),
        "new/b.py": Move("old/b.py", is_equal=False),
    }


def test_a_dropped_file_was_moved_to_one_place_only(tmp_path: Path) -> None:
    assert moves_of(tmp_path, {"a.py": TEN, "b.py": TEN}, {"c.py": TEN}) == {"a.py": Move("c.py", is_equal=True)}


def test_files_with_too_few_equal_lines_and_empty_ones_were_not_moved(tmp_path: Path) -> None:
    half = "".join(TEN.splitlines(keepends=True)[:5]) + "other\n" * 5
    assert moves_of(tmp_path, {"new/a.py": half, "new/__init__.py": ""}, {"a.py": TEN, "__init__.py": ""}) == {}


def test_likeness_is_the_share_of_equal_lines() -> None:
    assert likeness(b"a\nb\nc\n", b"a\nb\nd\n") == pytest.approx(4 / 6)
    assert likeness(b"a\nb\n", b"a\r\nb\r\n") == 0
    assert likeness(b"a\n", b"a\n") == 1
    assert ALIKE < 4 / 6
