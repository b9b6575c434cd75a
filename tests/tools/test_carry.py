"""`carry`: a fix goes from the milestone where it was made to every later one (the tree is conftest.py's).

cache.py is changed in v0.2 and v0.4, where line 6 and the last line are other ones, and the same in v0.3.
"""

from typing import Any

import pytest

from tools.ledger import main


@pytest.fixture
def carry(tree: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; returns exit status, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["--root", str(tree.root), "carry", *arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


@pytest.fixture
def refuses(tree: Any, carry: Any) -> Any:
    """Run the command, which has to fail and to leave every file alone; returns what it says."""

    def run(*arguments: str) -> str:
        before = tree.snapshot()
        status, output, error = carry(*arguments)
        assert status == 1
        assert output == ""
        assert tree.snapshot() == before
        return error

    return run


def test_a_same_file_is_copied_everywhere(tree: Any, carry: Any) -> None:
    tree.write("v0_1_first/llm.py", "fixed\n")
    status, output, _ = carry("llm.py", "--from", "v0_1_first")
    assert status == 0
    assert [tree.read(f"{name}/llm.py") for name in ("v0_2_second", "v0_3_third", "v0_4_fourth")] == ["fixed\n"] * 3
    assert output.splitlines()[1] == "v0_2_second/llm.py: same, copied"


def test_a_fix_goes_through_changed_files(tree: Any, carry: Any) -> None:
    tree.edit("v0_1_first/cache.py", "line 2\n", "line two\n")
    status, output, _ = carry("cache.py", "--from", "v0_1")
    assert status == 0
    assert output.splitlines() == [
        "v0_1_first/cache.py: the fix",
        "v0_2_second/cache.py: changed, merged",
        "v0_3_third/cache.py: same, copied",
        "v0_4_fourth/cache.py: changed, merged",
    ]
    second, third, fourth = (tree.read(f"{name}/cache.py") for name in ("v0_2_second", "v0_3_third", "v0_4_fourth"))
    assert second == third
    assert "line two\n" in second
    assert "the lesson of v0.2\n" in second
    assert fourth == second.replace("line 6\n", "the lesson of v0.4\n")
    assert main(["--root", str(tree.root), "check"]) == 0


def test_a_fix_in_the_middle_leaves_what_was_before(tree: Any, carry: Any) -> None:
    tree.edit("v0_2_second/cache.py", "the lesson of v0.2\n", "the lesson, fixed\n")
    before = tree.read("v0_1_first/cache.py")
    status, output, _ = carry("./v0_2_second/cache.py", "--from", "v0_2")  # a path from the root will do, too
    assert status == 0
    assert "v0_1_first" not in output
    assert tree.read("v0_1_first/cache.py") == before
    assert tree.read("v0_3_third/cache.py") == tree.read("v0_2_second/cache.py")
    assert "the lesson, fixed\n" in tree.read("v0_4_fourth/cache.py")


def test_carrying_twice_is_carrying_once(tree: Any, carry: Any) -> None:
    tree.edit("v0_1_first/cache.py", "line 2\n", "line two\n")
    carry("cache.py", "--from", "v0_1")
    before = tree.snapshot()
    status, output, _ = carry("cache.py", "--from", "v0_1")
    assert status == 0
    assert output.count("has the fix already") == 3
    assert tree.snapshot() == before


def test_carrying_again_does_what_is_missing(tree: Any, carry: Any) -> None:
    tree.edit("v0_1_first/cache.py", "line 2\n", "line two\n")
    carry("cache.py", "--from", "v0_1")
    complete = tree.snapshot()
    tree.git("checkout", "HEAD", "--", "v0_3_third", "v0_4_fourth")
    status, output, _ = carry("cache.py", "--from", "v0_1")
    assert status == 0
    assert "v0_2_second/cache.py: changed, has the fix already\nv0_3_third/cache.py: same, copied\n" in output
    assert tree.snapshot() == complete


def test_a_conflict_stays_visible_and_is_carried_on_from_there(
    tree: Any, carry: Any, refuses: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tree.edit("v0_1_first/cache.py", "line 12\n", "line twelve\n")
    third = tree.read("v0_3_third/cache.py")
    status, output, _ = carry("cache.py", "--from", "v0_1")
    assert status == 1
    assert "v0_2_second/cache.py: changed, CONFLICT" in output
    assert "v0_3_third/cache.py" not in output
    assert output.endswith(
        "To go on: resolve the conflict in v0_2_second/cache.py, then run\n"
        "    python -m tools.ledger carry cache.py --from v0_2_second\n"
    )
    conflict = tree.read("v0_2_second/cache.py")
    assert "<<<<<<< v0_2_second/cache.py\nthe lesson of v0.2\n" in conflict
    assert "=======\nline twelve\n>>>>>>> v0_1_first/cache.py\n" in conflict
    assert tree.read("v0_3_third/cache.py") == third
    assert main(["--root", str(tree.root), "check"]) == 1
    capsys.readouterr()

    # Nothing goes on while the markers stand.
    assert "v0_2_second/cache.py still has conflict markers" in refuses("cache.py", "--from", "v0_2")
    status, output, _ = carry("cache.py", "--from", "v0_1")
    assert status == 1
    assert "v0_2_second/cache.py: changed, still has conflict markers\nTo go on: resolve" in output
    assert tree.read("v0_2_second/cache.py") == conflict

    lines = conflict.splitlines(keepends=True)
    tree.write("v0_2_second/cache.py", "".join(lines[:11]) + "the lesson of v0.2, fixed\n")
    # The resolved file is not touched by the first command; the second one goes on.
    assert "--from v0_2_second`" in refuses("cache.py", "--from", "v0_1")
    assert carry("cache.py", "--from", "v0_2")[0] == 0
    assert tree.read("v0_3_third/cache.py") == tree.read("v0_2_second/cache.py")
    assert "the lesson of v0.2, fixed\n" in tree.read("v0_4_fourth/cache.py")
    assert "the lesson of v0.4\n" in tree.read("v0_4_fourth/cache.py")


def test_a_conflict_further_on_lets_the_others_be_carried(tree: Any, carry: Any) -> None:
    tree.edit("v0_1_first/cache.py", "line 6\n", "line six\n")
    status, output, _ = carry("cache.py", "--from", "v0_1")
    assert status == 1
    assert output.splitlines()[1:4] == [
        "v0_2_second/cache.py: changed, merged",
        "v0_3_third/cache.py: same, copied",
        "v0_4_fourth/cache.py: changed, CONFLICT: both versions are in the file, between markers",
    ]
    assert tree.read("v0_3_third/cache.py") == tree.read("v0_2_second/cache.py")


def test_a_drifted_copy_is_not_overwritten(tree: Any, refuses: Any) -> None:
    tree.write("v0_4_fourth/llm.py", "drifted\n")
    tree.commit()
    tree.write("v0_1_first/llm.py", "fixed\n")
    error = refuses("llm.py", "--from", "v0_1")
    assert "v0_4_fourth/llm.py is listed as same but is not its predecessor's file" in error


def test_edits_in_a_copy_are_not_overwritten(tree: Any, refuses: Any) -> None:
    tree.write("v0_1_first/llm.py", "fixed\n")
    tree.write("v0_3_third/llm.py", "edited, not committed\n")
    assert "v0_3_third/llm.py is listed as same but is not" in refuses("llm.py", "--from", "v0_1")


def test_edits_in_a_changed_file_are_kept(tree: Any, carry: Any) -> None:
    tree.edit("v0_4_fourth/cache.py", "line 9\n", "not committed\n")
    tree.edit("v0_1_first/cache.py", "line 2\n", "line two\n")
    for expected in ("changed, merged", "changed, has the fix already"):
        status, output, _ = carry("cache.py", "--from", "v0_1")
        assert status == 0
        assert f"v0_4_fourth/cache.py: {expected}\n" in output
        assert "line two\n" in tree.read("v0_4_fourth/cache.py")
        assert "not committed\n" in tree.read("v0_4_fourth/cache.py")


def test_edits_that_conflict_with_the_fix_are_not_touched(tree: Any, refuses: Any) -> None:
    tree.edit("v0_4_fourth/cache.py", "line 2\n", "not committed\n")
    tree.edit("v0_1_first/cache.py", "line 2\n", "line two\n")
    assert "v0_4_fourth/cache.py is not as it is in HEAD, and the fix conflicts" in refuses(
        "cache.py", "--from", "v0_1"
    )


def test_a_fix_follows_into_a_milestone_that_is_not_committed(tree: Any, carry: Any) -> None:
    tree.git("rm", "--quiet", "-r", "--cached", "v0_4_fourth")
    tree.git("commit", "--quiet", "--message", "v0.4 is still being written")
    tree.edit("v0_1_first/cache.py", "line 2\n", "line two\n")
    for _ in range(2):
        assert carry("cache.py", "--from", "v0_1")[0] == 0
        assert "line two\n" in tree.read("v0_4_fourth/cache.py")
        assert "the lesson of v0.4\n" in tree.read("v0_4_fourth/cache.py")


def test_the_fix_ends_where_the_file_is_dropped(tree: Any, carry: Any) -> None:
    before = tree.snapshot()
    tree.write("v0_1_first/only_first.py", "fixed\n")
    status, output, _ = carry("only_first.py", "--from", "v0_1")
    assert status == 0
    assert "v0_2_second/only_first.py: dropped in this milestone, the fix ends here\n" in output
    # v0.3 has a file of this name again. It is another one, but may have the fault as well.
    assert "v0_3_third has a file of this name again (new)" in output
    assert tree.snapshot() == before | {"v0_1_first/only_first.py": "fixed\n"}


def test_a_new_file_starts_a_fix_of_its_own(tree: Any, carry: Any) -> None:
    tree.write("v0_3_third/only_first.py", "fixed\n")
    assert carry("only_first.py", "--from", "v0_3")[0] == 0
    assert tree.read("v0_4_fourth/only_first.py") == "fixed\n"
    assert tree.read("v0_1_first/only_first.py") == "an experiment\n"


def test_a_fix_reaches_every_milestone_that_was_copied_from_one(tree: Any, carry: Any) -> None:
    tree.edit_ledger('predecessor = "v0_3_third"', 'predecessor = "v0_1_first"')
    tree.edit("v0_1_first/cache.py", "line 12\n", "line twelve\n")
    tree.write("v0_4_fourth/cache.py", "first\n" + tree.read("v0_1_first/cache.py").replace("line twelve", "line 12"))
    tree.git("commit", "--quiet", "--message", "v0.4 follows v0.1", "v0_4_fourth", "pyproject.toml")
    status, output, _ = carry("cache.py", "--from", "v0_1")
    assert status == 1
    assert "v0_2_second/cache.py: changed, CONFLICT" in output
    assert "v0_4_fourth/cache.py: changed, merged" in output  # its way does not lead through the conflict
    assert "line twelve\n" in tree.read("v0_4_fourth/cache.py")


def test_a_committed_fix_is_carried_with_base(tree: Any, carry: Any) -> None:
    tree.edit("v0_1_first/cache.py", "line 2\n", "line two\n")
    tree.commit()
    status, output, _ = carry("cache.py", "--from", "v0_1")
    assert status == 0
    assert "nothing to carry" in output
    assert "--base REV" in output
    assert carry("cache.py", "--from", "v0_1", "--base", "HEAD~1")[0] == 0
    assert "line two\n" in tree.read("v0_4_fourth/cache.py")


def test_the_project_may_be_a_folder_of_the_repository(tree: Any) -> None:
    paths = [path for path in tree.root.iterdir() if path.name != ".git"]
    project = tree.root / "project"
    project.mkdir()
    for path in paths:
        path.rename(project / path.name)
    tree.commit()
    tree.write("project/v0_1_first/llm.py", "fixed\n")
    assert main(["--root", str(project), "carry", "llm.py", "--from", "v0_1"]) == 0
    assert tree.read("project/v0_4_fourth/llm.py") == "fixed\n"


def test_line_ends_are_those_of_the_checkout(tree: Any, carry: Any) -> None:
    tree.write(".gitattributes", "*.py text eol=crlf\n")
    for file in tree.root.glob("v0_*/llm.py"):
        file.write_bytes(b"before\r\n")
    tree.commit()
    (tree.root / "v0_1_first" / "llm.py").write_bytes(b"after\r\n")
    assert carry("llm.py", "--from", "v0_1")[0] == 0
    assert (tree.root / "v0_4_fourth" / "llm.py").read_bytes() == b"after\r\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.py", "--from", "v0_1"), "v0_1_first/nothing.py is no file of the ledger"),
        (("llm.py", "--from", "v0_7"), "v0_7 is no milestone of the ledger"),
        (("only_first.py", "--from", "v0_2"), "v0_2_second/only_first.py is no file of the ledger"),
        (("llm.py", "--from", "v0_2"), "v0_2_second/llm.py is the same file as in v0_1_first: make the fix there"),
        (("cache.py", "--from", "v0_1", "--base", "no-such"), "no-such is no commit of this repository"),
    ],
)
def test_a_wrong_command_is_refused(arguments: tuple[str, ...], message: str, tree: Any, refuses: Any) -> None:
    tree.write("v0_1_first/cache.py")
    assert message in refuses(*arguments)


def test_a_file_without_a_committed_version_is_refused(tree: Any, refuses: Any) -> None:
    tree.edit_ledger('new = ["llm.py", ', 'new = ["fresh.py", "llm.py", ')
    assert "v0_1_first/fresh.py does not exist" in refuses("fresh.py", "--from", "v0_1")
    tree.write("v0_1_first/fresh.py")
    assert "v0_1_first/fresh.py is not in HEAD" in refuses("fresh.py", "--from", "v0_1")


def test_a_faulty_ledger_is_refused(tree: Any, refuses: Any) -> None:
    tree.write("v0_1_first/llm.py", "fixed\n")
    tree.remove("v0_4_fourth/llm.py")
    assert "v0_4_fourth/llm.py does not exist" in refuses("llm.py", "--from", "v0_1")
    tree.edit_ledger('same = ["llm.py", "blocks.py"', 'same = ["blocks.py"')
    assert "v0_4_fourth/llm.py is not in the ledger" in refuses("llm.py", "--from", "v0_1")
    tree.edit_ledger('predecessor = "v0_3_third"', 'predecessor = "v0_3_thrid"')
    assert "v0_3_thrid, which is not in the ledger" in refuses("llm.py", "--from", "v0_1")


def test_a_binary_file_that_changed_cannot_be_merged(tree: Any, refuses: Any) -> None:
    tree.write("v0_1_first/cache.py", "\0\n")
    assert "git merge-file failed for v0_2_second/cache.py" in refuses("cache.py", "--from", "v0_1")
