"""Folders as entries of the ledger: what they stand for, what `check` says of them, and how `carry` goes through them.

conftest.py's tree gets measurements/, with other files in v0.1 and v0.2 and none later, and server/ from v0.2 on.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tools.ledger import ledger_faults, main
from tools.milestones import Folder, load_ledger

FOURTH_SAME = 'same = ["server/", "llm.py", "blocks.py", "only_first.py"]'
SERVER = ("server/app.py", "server/web/page.html")


@pytest.fixture
def folders(tree: Any) -> Any:
    tree.write("v0_1_first/measurements/decode.py", "decode\n")
    tree.write("v0_2_second/measurements/blocks.py", "blocks\n")
    tree.write("v0_2_second/measurements/results.json", "{}\n")  # results do not count
    for name in ("v0_2_second", "v0_3_third", "v0_4_fourth"):
        tree.write(f"{name}/server/app.py", "app\n")
        tree.write(f"{name}/server/web/page.html", "<p>page</p>\n")
    tree.edit_ledger('new = ["llm.py", ', 'new = ["measurements/", "llm.py", ')
    tree.edit_ledger('new = ["blocks.py"]', 'new = ["blocks.py", "server/", "measurements/"]')
    tree.edit_ledger('dropped = ["only_first.py"]', 'dropped = ["only_first.py", "measurements/"]')
    tree.edit_ledger('new = ["only_first.py"]', 'new = ["only_first.py"]\ndropped = ["measurements/"]')
    tree.edit_ledger('same = ["llm.py", "cache.py", "web', 'same = ["llm.py", "server/", "cache.py", "web')
    tree.edit_ledger('same = ["llm.py", "blocks.py", "only_first.py"]', FOURTH_SAME)
    tree.commit()
    return tree


def faults(tree: Any) -> list[str]:
    return ledger_faults(tree.root, load_ledger(tree.root))


def change_app(tree: Any) -> None:
    tree.write("v0_4_fourth/server/app.py", "the lesson of v0.4\n")
    tree.edit_ledger(
        'changed = ["cache.py", "web/index.html"]', 'changed = ["cache.py", "web/index.html", "server/app.py"]'
    )


def test_files_take_the_place_of_their_folder(folders: Any) -> None:
    _, second, third, fourth = load_ledger(folders.root)
    assert second.new == ("blocks.py", *SERVER, "measurements/blocks.py")
    assert second.dropped == ("only_first.py", "measurements/decode.py")
    assert third.same == ("llm.py", *SERVER, "cache.py", "web/index.html")
    assert third.dropped == ("measurements/blocks.py",)
    assert third.folders == (
        Folder("same", "server/", SERVER),
        Folder("dropped", "measurements/", ("measurements/blocks.py",)),
    )
    assert fourth.kind("server/app.py") == "same"


def test_a_true_ledger_with_folders_has_no_faults(folders: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(folders.root), "check"]) == 0
    output = capsys.readouterr().out
    assert "v0_2_second: 4 new, 1 changed, 2 same, 2 dropped; 2 changed lines\n" in output
    assert "v0_3_third: 1 new, 1 changed, 5 same, 1 dropped; 2 changed lines\n" in output


def test_an_exception_is_listed_by_its_own_name(folders: Any) -> None:
    change_app(folders)
    assert faults(folders) == []
    fourth = load_ledger(folders.root)[3]
    assert fourth.same == ("server/web/page.html", "llm.py", "blocks.py", "only_first.py")
    assert fourth.kind("server/app.py") == "changed"


def test_a_folder_that_gets_other_files_keeps_one_that_is_listed_by_its_own_name(folders: Any) -> None:
    for name in ("v0_1_first", "v0_2_second"):
        folders.write(f"{name}/measurements/__init__.py", "")
    assert faults(folders) == [
        "v0_2_second/measurements/__init__.py is listed 2 times (new, dropped): list it once, by its own name, as same."
    ]
    folders.edit_ledger('same = ["llm.py", "web', 'same = ["llm.py", "measurements/__init__.py", "web')
    assert faults(folders) == []


def test_the_files_of_a_folder_may_be_replaced_one_by_one(folders: Any) -> None:
    folders.edit_ledger('"server/", "measurements/"]', '"server/", "measurements/blocks.py"]')
    folders.edit_ledger('["only_first.py", "measurements/"]', '["only_first.py", "measurements/decode.py"]')
    assert faults(folders) == []


# What is done to the tree, and the faults that are then found.
BREACHES: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "same, but a copy drifted": (
        lambda tree: tree.write("v0_4_fourth/server/app.py"),
        [
            "v0_4_fourth/server/app.py is listed as same but differs from v0_3_third/server/app.py: carry the fix "
            "forward (`python -m tools.ledger carry`), copy the file, or list it as changed."
        ],
    ),
    "same, but with one file more": (
        lambda tree: tree.write("v0_4_fourth/server/errors.py"),
        ["v0_4_fourth/server/errors.py is listed as same, but v0_3_third does not have it: list it as new."],
    ),
    "same, but with one file less": (
        lambda tree: tree.remove("v0_4_fourth/server/app.py"),
        ["v0_4_fourth/server/app.py is listed as same but does not exist: add it, or list it as dropped."],
    ),
    "new, but the predecessor has a file": (
        lambda tree: tree.write("v0_1_first/server/app.py", "app\n"),
        [
            "v0_1_first/server/app.py is not listed: list it as new, or remove it.",
            "v0_2_second/server/app.py is listed as new, but v0_1_first has it: list it as same.",
        ],
    ),
    "new, but the predecessor has another file": (
        lambda tree: tree.edit_ledger('dropped = ["only_first.py", "measurements/"]', 'dropped = ["only_first.py"]'),
        ["v0_2_second does not account for v0_1_first/measurements/decode.py: list it as dropped, or copy it."],
    ),
    "dropped, but a file is still there": (
        lambda tree: tree.write("v0_3_third/measurements/blocks.py", "blocks\n"),
        [
            "v0_3_third/measurements/blocks.py is listed as dropped but is still there: remove it, or list it as same.",
            "v0_4_fourth does not account for v0_3_third/measurements/blocks.py: list it as dropped, or copy it.",
        ],
    ),
    "folder without a file": (
        lambda tree: tree.edit_ledger(FOURTH_SAME, FOURTH_SAME.replace('"server/"', '"server/", "harness/"')),
        ["v0_4_fourth/harness/ is listed as same but stands for no file: take it out."],
    ),
    "folder in a folder": (
        lambda tree: tree.edit_ledger(FOURTH_SAME, FOURTH_SAME.replace('"server/"', '"server/", "server/web/"')),
        ["v0_4_fourth/server/web/page.html is listed 2 times (same, same): list it once, by its own name, as same."],
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_check_says_what_is_wrong_with_a_folder(breach: str, folders: Any) -> None:
    break_it, expected = BREACHES[breach]
    break_it(folders)
    assert faults(folders) == expected


def test_a_fix_is_copied_through_folders_that_are_the_same(folders: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folders.write("v0_2_second/server/app.py", "fixed\n")
    assert main(["--root", str(folders.root), "carry", "server/app.py", "--from", "v0_2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "v0_2_second/server/app.py: the fix",
        "v0_3_third/server/app.py: same, copied",
        "v0_4_fourth/server/app.py: same, copied",
    ]
    assert folders.read("v0_4_fourth/server/app.py") == "fixed\n"
    assert faults(folders) == []


def test_a_fix_is_merged_into_the_one_changed_file_of_a_folder(folders: Any) -> None:
    change_app(folders)
    for name in ("v0_2_second", "v0_3_third"):
        folders.write(f"{name}/server/app.py", "app\n2\n3\n4\n5\n")
    folders.write("v0_4_fourth/server/app.py", "app\n2\n3\n4\nthe lesson of v0.4\n")
    folders.commit()
    folders.edit("v0_2_second/server/app.py", "app\n", "fixed\n")
    assert main(["--root", str(folders.root), "carry", "server/app.py", "--from", "v0_2"]) == 0
    assert folders.read("v0_4_fourth/server/app.py") == "fixed\n2\n3\n4\nthe lesson of v0.4\n"


def test_a_fix_ends_where_its_folder_is_dropped(folders: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folders.write("v0_2_second/measurements/blocks.py", "fixed\n")
    assert main(["--root", str(folders.root), "carry", "measurements/blocks.py", "--from", "v0_2"]) == 0
    assert "v0_3_third/measurements/blocks.py: dropped in this milestone" in capsys.readouterr().out
