"""`check`: the ledger against made-up trees (conftest.py), and against the real one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.ledger import changed_lines, ledger_faults, main
from tools.milestones import LedgerError, find_milestone, load_ledger

ROOT = Path(__file__).parents[2]
FOURTH_SAME = 'same = ["llm.py", "blocks.py", "only_first.py"]'


def faults(root: Path) -> list[str]:
    return ledger_faults(root, load_ledger(root))


def test_the_real_ledger_holds() -> None:
    assert faults(ROOT) == []


def test_a_true_ledger_has_no_faults(tree: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tree.root), "check"]) == 0
    output = capsys.readouterr().out
    assert "v0_2_second: 1 new, 1 changed, 2 same, 1 dropped; 2 changed lines\n" in output
    assert output.endswith("The ledger holds.\n")


def drop_unlisted(tree: Any) -> None:
    tree.remove("v0_4_fourth/only_first.py")
    tree.edit_ledger(FOURTH_SAME, 'same = ["llm.py", "blocks.py"]')


# What is done to the tree, and how the faults start that are then found: these, in this order, and no others.
BREACHES: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "drifted copy": (
        lambda tree: tree.write("v0_4_fourth/llm.py"),
        ["v0_4_fourth/llm.py is listed as same but differs from v0_3_third/llm.py: carry the fix forward"],
    ),
    "unlisted file": (
        lambda tree: tree.write("v0_4_fourth/web/extra.js"),
        ["v0_4_fourth/web/extra.js is not listed: list it as new, or remove it."],
    ),
    "unlisted copy": (
        lambda tree: tree.edit_ledger(FOURTH_SAME, 'same = ["llm.py", "blocks.py"]'),
        ["v0_4_fourth/only_first.py is not listed: list it as same, or remove it."],
    ),
    "file of the predecessor not accounted for": (
        drop_unlisted,
        ["v0_4_fourth does not account for v0_3_third/only_first.py: list it as dropped, or copy it."],
    ),
    "false changed": (
        lambda tree: tree.write("v0_4_fourth/web/index.html", "<p>page</p>\n"),
        ["v0_4_fourth/web/index.html is listed as changed but equals v0_3_third/web/index.html: list it as same."],
    ),
    "false new": (
        lambda tree: tree.edit_ledger(FOURTH_SAME, 'same = ["blocks.py", "only_first.py"]\nnew = ["llm.py"]'),
        ["v0_4_fourth/llm.py is listed as new, but v0_3_third has it: list it as same."],
    ),
    "new, but listed as changed": (
        lambda tree: tree.edit_ledger('new = ["blocks.py"]\nchanged = [', 'changed = ["blocks.py", '),
        ["v0_2_second/blocks.py is listed as changed, but v0_1_first does not have it: list it as new."],
    ),
    "dropped, but still there": (
        lambda tree: tree.write("v0_2_second/only_first.py"),
        [
            "v0_2_second/only_first.py is listed as dropped but is still there: remove it, or list it as changed.",
            "v0_3_third/only_first.py is listed as new, but v0_2_second has it: list it as changed.",
        ],
    ),
    "dropped, but never there": (
        lambda tree: tree.edit_ledger('dropped = ["only_first.py"', 'dropped = ["only_first.py", "web/app.js"'),
        ["v0_2_second/web/app.js is listed as dropped, but v0_1_first does not have it: take it out of the ledger."],
    ),
    "listed file that never existed": (
        lambda tree: tree.edit_ledger('new = ["blocks.py"]', 'new = ["blocks.py", "web/app.js"]'),
        ["v0_2_second/web/app.js is listed as new but does not exist: add it, or take it out of the ledger."],
    ),
    "listed file that does not exist": (
        lambda tree: tree.remove("v0_4_fourth/llm.py"),
        ["v0_4_fourth/llm.py is listed as same but does not exist: add it, or list it as dropped."],
    ),
    "listed twice": (
        lambda tree: tree.edit_ledger('new = ["blocks.py"]', 'new = ["blocks.py", "blocks.py"]'),
        ["v0_2_second/blocks.py is listed 2 times (new, new): list it once, by its own name, as new."],
    ),
    "folder without an entry": (
        lambda tree: tree.write("v0_5_fifth/llm.py"),
        ["v0_5_fifth has no entry: add [tool.milestones.v0_5_fifth], or remove the folder."],
    ),
    "entry without a folder": (
        lambda tree: (tree.root / "v0_4_fourth").rename(tree.root / "elsewhere"),
        ["v0_4_fourth has an entry but no folder: add the folder, or take the entry out."],
    ),
    "predecessor that does not exist": (
        lambda tree: tree.edit_ledger('predecessor = "v0_3_third"', 'predecessor = "v0_3_thrid"'),
        ["v0_4_fourth has the predecessor v0_3_thrid, which is not in the ledger: correct the name."],
    ),
    "no predecessor": (
        lambda tree: tree.edit_ledger('predecessor = "v0_3_third"\nsame', "new"),
        [
            "v0_4_fourth has no predecessor: name the milestone that it was copied from.",
            "v0_4_fourth/cache.py is listed as changed, but there is no predecessor: list it as new.",
            "v0_4_fourth/web/index.html is listed as changed, but there is no predecessor: list it as new.",
        ],
    ),
    "predecessor of the first": (
        lambda tree: tree.edit_ledger('title = "first"', 'title = "first"\npredecessor = "v0_0"'),
        ["v0_1_first is the first milestone: take its predecessor v0_0 out of the ledger."],
    ),
    "predecessor that comes later": (
        lambda tree: tree.edit_ledger('predecessor = "v0_3_third"', 'predecessor = "v0_4_fourth"'),
        [
            "v0_4_fourth has the predecessor v0_4_fourth, which does not come before it: reorder them.",
            "v0_4_fourth/cache.py is listed as changed but equals v0_4_fourth/cache.py",
            "v0_4_fourth/web/index.html is listed as changed but equals v0_4_fourth/web/index.html",
        ],
    ),
    "conflict markers": (
        lambda tree: tree.write("v0_4_fourth/web/index.html", "<<<<<<< ours\n"),
        ["v0_4_fourth/web/index.html has conflict markers in it: resolve them, then carry on with --from v0_4_fourth."],
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_check_says_what_is_wrong(breach: str, tree: Any) -> None:
    break_it, expected = BREACHES[breach]
    break_it(tree)
    found = faults(tree.root)
    assert len(found) == len(expected), found
    for fault, start in zip(found, expected, strict=True):
        assert fault.startswith(start)
        assert fault.endswith(".")
        assert "\n" not in fault


def test_check_turns_ci_red(tree: Any) -> None:
    tree.write("v0_4_fourth/llm.py")
    command = [sys.executable, "-m", "tools.ledger", "--root", str(tree.root), "check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "fault: v0_4_fourth/llm.py is listed as same but differs" in result.stdout
    assert result.stdout.endswith("1 fault(s) in the ledger.\n")


def test_a_big_step_is_a_warning(tree: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tree.write("v0_4_fourth/web/index.html", "<p>line</p>\n" * 300)
    assert main(["--root", str(tree.root), "check"]) == 0
    assert "warning: v0_4_fourth changes 303 lines of existing files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(b"a\nb\n", b"a\nb\n", 0), (b"a\nb\n", b"a\nc\n", 2), (b"", b"a\nb\n", 2), (b"a\nb\nc\n", b"b\n", 2)],
)
def test_changed_lines_are_removed_plus_added(before: bytes, after: bytes, expected: int) -> None:
    assert changed_lines(before, after) == expected


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('title = "x"\nnwe = ["a.py"]', "unknown key 'nwe'"),
        ("new = []", "title"),
        ('title = "x"\nnew = "a.py"', "new must be a list of paths"),
        ('title = "x"\nnew = ["../a.py"]', "new must be a list of paths"),
        ('title = "x"\nnew = ["./a.py"]', "new must be a list of paths"),
        ('title = "x"\nnew = [""]', "new must be a list of paths"),
        ('title = "x"\nnew = ["/"]', "new must be a list of paths"),
        ('title = "x"\nnew = ["a//"]', "new must be a list of paths"),
        ('title = "x"\nnew = ["../a/"]', "new must be a list of paths"),
        ('title = "x"\nchanged = ["a/"]', "List the changed files of a/ one by one"),
        ("title = ", "is not valid TOML"),
    ],
)
def test_a_malformed_entry_is_refused(entry: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.milestones.v0_1]\n{entry}\n")
    with pytest.raises(LedgerError, match=message):
        load_ledger(tmp_path)


def test_a_folder_without_ledger_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path), "check"]) == 1
    assert "holds no [tool.milestones]" in capsys.readouterr().err


def test_names_may_be_short(tree: Any) -> None:
    milestones = load_ledger(tree.root)
    assert find_milestone(milestones, "v0_2").name == find_milestone(milestones, "v0_2_second").name == "v0_2_second"
    with pytest.raises(LedgerError, match="v0_ is no milestone"):
        find_milestone(milestones, "v0_")
