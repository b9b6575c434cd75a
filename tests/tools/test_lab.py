"""The lab: what it takes out, what it says, and what becomes of a learner's work. In a folder of its own."""

import ast
import builtins
import keyword
import os
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import OrderedDict, deque
from pathlib import Path

import pytest
import torch

from tools.lab import bodies, start
from tools.lab.tasks import LabError, all_tasks, find_task, tasks_of, version
from tools.lab.texts import faults_of, hints_of
from tools.lab.trial import Failure, Job, Report, run
from tools.lab.words import first_failure, sentence
from tools.milestones import LedgerError, Milestone, load_ledger

ROOT = Path(__file__).parents[2]
TASKS = all_tasks()
SOURCE = '''"""A file."""


class Pool:
    """All of it."""

    @property
    def size(self) -> int:
        # A comment that gives it away.
        return 1  # and another

    def grow(
        self, num: int
    ) -> "Pool":
        """Make it larger.

        Raises:
            ValueError: it cannot be.
        """

        if num:
            return self
        return Pool()

    async def read(self):
        """One after the other."""
        for i in range(3):
            yield i


def é(ä):
    """One."""; return [ä, "é", 1 + 2]
'''


@pytest.fixture
def lab(tmp_path):
    """`lab("start", "v0_2")`: the command line on a folder of its own; returns exit code, output and errors."""

    def call(*arguments):
        environment = os.environ | {"MINI_VLLM_LAB": str(call.folder), "COLUMNS": "80"}
        command = [sys.executable, "-m", "tools.lab", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    call.folder = tmp_path / "lab"
    return call


def write(lab, milestone, file, name, body=None):
    """Put a body into a learner's function: the milestone's own, unless told otherwise."""
    path = lab.folder / milestone / file
    if body is None:
        body = bodies.body((ROOT / milestone / file).read_text(), name, file)
    path.write_text(bodies.with_body(path.read_text(), name, body, file))


def write_task(lab, task):
    for function in task.functions:
        write(lab, task.milestone, function.file, function.name)


# What is taken out, and put in.


def test_a_body_is_what_comes_after_signature_and_docstring_comments_included():
    assert (
        bodies.body(SOURCE, "Pool.size", "")
        == "        # A comment that gives it away.\n        return 1  # and another"
    )
    assert bodies.body(SOURCE, "Pool.grow", "").strip().startswith("if num:")
    assert bodies.line_of(SOURCE, "Pool.read", "") == SOURCE[: SOURCE.index("        for i in")].count("\n") + 1


@pytest.mark.parametrize("name", ["Pool.size", "Pool.grow", "Pool.read"])
def test_taking_a_body_out_and_putting_it_back_gives_the_same_bytes(name):
    emptied = bodies.without_body(SOURCE, name, "Task 1: it.", "")
    assert bodies.is_missing(emptied, name, "")
    assert not bodies.is_missing(SOURCE, name, "")
    assert bodies.with_body(emptied, name, bodies.body(SOURCE, name, ""), "") == SOURCE
    node = bodies.find(emptied, name, "")
    assert ast.get_docstring(node) == ast.get_docstring(bodies.find(SOURCE, name, ""))


def test_what_is_left_raises_an_error_that_names_the_task():
    namespace = {}
    exec(bodies.without_body(SOURCE, "Pool.size", "Task 7: Pool.size.", ""), namespace)
    with pytest.raises(NotImplementedError, match=r"Task 7: Pool\.size\."):
        namespace["Pool"]().size  # noqa: B018


def test_a_file_that_is_no_python_is_told_with_line_and_column():
    with pytest.raises(LabError, match=r"(?s)pool\.py is not valid Python yet: .*line 2, column 7\.\n    x = \(1"):
        bodies.parse("def f():\n  x = (1\n", "pool.py")


def test_a_function_that_is_gone_is_told_by_name():
    with pytest.raises(LabError, match=r"pool\.py has no Pool\.shrink any more"):
        bodies.body(SOURCE, "Pool.shrink", "pool.py")


def test_a_fault_is_planted_by_its_tree_in_exactly_one_place():
    assert (
        bodies.planted("def f():\n    return a[ 1+2 ]  # é\n", "f", "1 + 2", "3", "")
        == "def f():\n    return a[ 3 ]  # é\n"
    )
    assert bodies.planted("def f(é):\n    g('é', 1 + 2)\n", "f", "1 + 2", "3", "") == "def f(é):\n    g('é', 3)\n"
    assert (
        bodies.planted("def f():\n    x = 1\n    y = 2\n", "f", "x = 1", "pass", "")
        == "def f():\n    pass\n    y = 2\n"
    )
    for old, times in (("9", 0), ("1", 2)):
        with pytest.raises(LabError, match=f"is in f {times} times"):
            bodies.planted("def f():\n    return 1 + 1\n", "f", old, "2", "")


# The ledger's tasks.


def milestone(*lab):
    return Milestone(name="v0_1_first", title="first", lab=lab)


TASK = {"title": "One", "minutes": 5, "write": ["llm.py LLM.f"], "tests": ["test_llm.py::test_f"]}


def test_a_task_is_read_from_the_ledger():
    [task] = tasks_of(milestone(TASK | {"real": ["test_contracts.py::test_real"]}))
    assert (task.number, task.title, task.minutes, task.names) == (1, "One", 5, "LLM.f")
    assert (task.tests, task.real) == (
        ("tests/v0_1/test_llm.py::test_f",),
        ("tests/v0_1/test_contracts.py::test_real",),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hint": "x"}, "unknown key 'hint'"),
        ({"title": 5}, "title must be a text and minutes a number"),
        ({"write": "llm.py LLM.f"}, "write must be a list of texts"),
        ({"write": ["llm.py"]}, "must be a file and a function"),
        ({"tests": []}, "tests is empty"),
    ],
)
def test_an_entry_that_cannot_be_is_told_with_its_place(change, message):
    with pytest.raises(LedgerError, match=rf"\[tool\.milestones\.v0_1_first\], task 1 of lab: .*{message}"):
        tasks_of(milestone(TASK | change))


@pytest.mark.parametrize("name", TASKS)
def test_every_milestone_has_tasks_of_functions_that_are_there_and_of_a_readable_size(name):
    least, most = (4, 8) if name < "v0_5" else (3, 5)
    assert least <= len(TASKS[name]) <= most
    seen = set()
    for task in TASKS[name]:
        num_lines = 0
        for function in task.functions:
            assert function not in seen
            seen.add(function)
            body = bodies.body((ROOT / name / function.file).read_text(), function.name, function.file)
            num_lines += sum(1 for line in body.split("\n") if line.strip() and not line.strip().startswith("#"))
        assert 4 <= num_lines <= 45, f"{task.title}: {num_lines} lines"
    assert len(hints_of(name)) == len(TASKS[name])
    assert TASKS[name][-1].real
    assert not any(task.real for task in TASKS[name][:-1])


def test_a_task_is_found_by_its_number_and_by_its_functions():
    tasks = TASKS["v0_2_block_manager"]
    for name in ("1", "allocate", "BlockManager.allocate"):
        assert find_task(tasks, name) is tasks[0]
    with pytest.raises(LabError, match=r"nothing names no task\. There are: 1 \(BlockManager"):
        find_task(tasks, "nothing")


# Hints and faults.


def names_in(source):
    """The names of a Python source, those in its strings and comments left out."""
    readline = iter(source.splitlines(keepends=True)).__next__
    return {token.string for token in tokenize.generate_tokens(readline) if token.type == tokenize.NAME}


KNOWN = set().union(
    dir(builtins),
    keyword.kwlist,
    keyword.softkwlist,
    *(dir(kind) for kind in (str, bytes, list, dict, set, OrderedDict, deque, torch, torch.Tensor)),
)


@pytest.mark.parametrize("name", TASKS)
def test_hints_mention_only_names_that_exist(name):
    files = [
        *(ROOT / name).rglob("*.py"),
        *(ROOT / "common").rglob("*.py"),
        *(ROOT / "tests" / version(name)).glob("*.py"),
    ]
    known = KNOWN.union(*(names_in(file.read_text()) for file in files))
    known |= {file.stem for file in files} | {"py"}
    helps = [*hints_of(name), *(fault.help for fault in faults_of(name))]
    texts = [text for each in helps for text in (each.question, each.idea)]
    texts += [text for fault in faults_of(name) for text in (fault.symptom, fault.why, fault.help.shape)]
    for text in texts:
        for code in re.findall(r"`([^`]+)`", text):
            unknown = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"\"[^\"]*\"|\bb\"", "", code))) - known
            assert not unknown, f"`{code}` in: {text}"
    for each in hints_of(name):
        code = re.sub(r"[fb]?\"[^\"]*\"|#.*", "0", each.shape)  # what is said in strings and comments is prose
        unknown = set(re.findall(r"[A-Za-z_]\w*", code)) - known
        assert not unknown, each.shape


@pytest.mark.parametrize("name", TASKS)
def test_a_milestone_has_five_faults_each_in_another_place(name):
    faults = faults_of(name)
    assert len(faults) == 5
    assert len({(fault.function, fault.old) for fault in faults}) == 5
    for fault in faults:
        source = (ROOT / name / fault.function.file).read_text()
        changed = bodies.planted(source, fault.function.name, fault.old, fault.new, "")
        assert changed != source
        ast.parse(changed)


# A learner's way.


def test_a_lab_is_the_milestone_but_for_the_bodies_of_its_tasks(tmp_path):
    for each in load_ledger(ROOT):
        if not each.lab:
            continue
        target = tmp_path / each.name
        start.make(each, tasks_of(each), target)
        functions = [function for task in tasks_of(each) for function in task.functions]
        files = {path.relative_to(target) for path in target.rglob("*") if path.is_file()}
        assert {Path(function.file) for function in functions} <= files
        for file in files:
            text = (target / file).read_text() if file.suffix in (".py", ".json") else None
            original = (ROOT / each.name / file).read_bytes()
            if text is None or file.as_posix() not in {function.file for function in functions}:
                assert (target / file).read_bytes() == original
                continue
            for function in functions:
                if function.file == file.as_posix():
                    assert bodies.is_missing(text, function.name, function.file)
                    body = bodies.body(original.decode(), function.name, function.file)
                    text = bodies.with_body(text, function.name, body, function.file)
            assert text.encode() == original


def test_from_start_to_the_second_task_and_back(lab):
    code, out, err = lab("check")
    assert (code, out) == (1, "")
    assert "There is no lab yet. Begin one with `python -m tools.lab start v0_1`." in err
    code, out, _ = lab("start", "v0.2")
    assert code == 0
    assert "7 tasks" in out
    code, out, _ = lab("check")
    assert code == 1
    assert "Not written yet:" in out
    assert "A table has as many blocks as its tokens need" in out

    name, file = "v0_2_block_manager", "block_manager.py"
    write_task(lab, TASKS[name][0])
    write(lab, name, file, "BlockManager.num_blocks_for", "        return num_tokens // self.block_size + 1")
    code, out, _ = lab("check")
    assert code == 1
    for line in (
        "With:     num_tokens = 16, num_blocks = 1",
        "Expected: 1",
        "Got:      2",
        "tests/v0_2/test_block_manager.py, line",
    ):
        assert line in out
    write(lab, name, file, "BlockManager.num_blocks_for")
    code, out, _ = lab("check")
    assert code == 0
    assert "✓ Task 1 of 7, Hand out blocks: 8 tests pass." in out
    assert "A: 36 tokens in blocks [0, 1, 2], 5 free" in out
    assert "Task 2 of 7: Grow a table" in out

    _, out, _ = lab("status")
    assert re.search(r"✓ +1\. Hand out blocks", out)
    assert re.search(r"▸ +2\. Grow a table", out)
    for level in ("question", "idea", "shape", "shape"):
        _, out, _ = lab("hint")
        assert out.count("\n1. question\n") == 1
        assert f". {level}\n" in out
    _, out, _ = lab("show")
    assert "-        raise NotImplementedError" in out
    assert "+        self._grow(request_id, num_tokens)" in out
    _, out, _ = lab("reset", "1")
    assert "Task 1 is to be written again" in out
    assert "Task 1 of 7" in lab("check")[1]
    _, out, _ = lab("start", "v0_2")
    assert "v0.2 is open again: 0 of 7 tasks are done." in out
    _, out, _ = lab("start", "v0_2", "--again")
    assert "v0_2_block_manager.old1" in out


def test_the_session_of_the_page_goes_as_the_page_shows(lab):
    """Its commands are typed, its functions are written, and each answer is the text that follows."""
    page = (ROOT / "docs" / "lab.md").read_text().partition("## A session")[2].partition("## The commands")[0]
    number = 0
    for language, fence in re.findall(r"^```(console|python|text)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if language == "console" and "tools.lab run" not in fence:
            _, answer, _ = lab(*fence.removeprefix("$ python -m tools.lab ").split())
        elif language == "python":
            for node in ast.parse(fence).body:
                body = textwrap.indent(bodies.body(fence, node.name, ""), "    ")
                write(lab, "v0_2_block_manager", "block_manager.py", f"BlockManager.{node.name}", body)
        elif language == "text":
            lines = [line.rstrip() for line in answer.replace(str(lab.folder), "lab").rstrip().split("\n")]
            assert "\n".join(lines) == fence.rstrip("\n")
            number += 1
    assert number == 5


def test_commands_that_cannot_be_say_what_to_do_next(lab):
    lab("start", "v0_1")
    for arguments, message in (
        (("check", "nothing"), "nothing names no task. There are: 1 (LLM._step); 2 "),
        (("start", "v0_5"), "v0_5 has nothing to write. The lab has tasks for v0_1, v0_2,"),
        (("start", "v0_99"), "There is no milestone v0_99"),
        (("start", "v0_2", "--fault", "6"), "v0_2 has faults 1 to 5, not 6"),
        (("start", "v0_2", "--fault", "1", "--through"), "do not go together"),
        (("check", "--all"), "No task is done yet"),
    ):
        code, _, err = lab(*arguments)
        assert code == 1
        assert err.startswith("error: ")
        assert message in err
    file = lab.folder / "v0_1_single_request" / "llm.py"
    file.write_text(file.read_text() + "def broken(:\n")
    code, _, err = lab("check")
    assert code == 1
    assert re.search(r"llm\.py is not valid Python yet: .*, line \d+, column 12\.\n    def broken\(:", err)


def test_earlier_work_is_carried_by_a_merge_and_what_conflicts_is_told(lab):
    lab("start", "v0_1")
    first, second = "v0_1_single_request", "v0_2_block_manager"
    for task in TASKS[first][:4]:
        write_task(lab, task)
    mine = bodies.body((ROOT / first / "llm.py").read_text(), "LLM._requests", "")
    write(lab, first, "llm.py", "LLM._requests", mine.replace("requests = []", "requests: list[Request] = []  # mine"))
    mine = bodies.body((ROOT / first / "llm.py").read_text(), "LLM._step", "")
    write(
        lab,
        first,
        "llm.py",
        "LLM._step",
        mine.replace("kv_cache.begin_step(len(token_ids))", "kv_cache.begin_step(len(token_ids))  # mine"),
    )
    code, out, _ = lab("start", "v0_2", "--through")
    assert code == 0
    assert "Brought along from your v0.1: llm.py: LLM._requests." in out
    assert "v0.2 changes the same lines of these, so they are as it has them: llm.py: LLM._step." in out
    text, reference = (lab.folder / second / "llm.py").read_text(), (ROOT / second / "llm.py").read_text()
    assert "requests: list[Request] = []  # mine" in text
    for name in ("LLM._step", "LLM._run", "LLM._collect"):  # one that conflicts, two that were never written
        assert bodies.body(text, name, "") == bodies.body(reference, name, "")
    for task in TASKS[second]:
        for function in task.functions:
            file = (lab.folder / second / function.file).read_text()
            assert bodies.is_missing(file, function.name, function.file)


def test_a_lab_whose_predecessor_is_no_python_is_not_begun(lab):
    lab("start", "v0_1")
    file = lab.folder / "v0_1_single_request" / "llm.py"
    file.write_text(file.read_text() + "def broken(:\n")
    code, _, err = lab("start", "v0_2", "--through")
    assert code == 1
    assert "llm.py is not valid Python yet" in err
    assert not (lab.folder / "v0_2_block_manager").exists()


def test_a_fault_is_told_by_its_symptom_and_found_when_its_tests_pass(lab):
    code, out, _ = lab("start", "v0_2", "--fault", "1")
    assert code == 0
    assert "16 tokens need 2 blocks" in out
    assert "num_blocks_for" not in out.replace("manager.num_blocks_for(num_tokens)", "")
    code, out, _ = lab("check")
    assert code == 1
    assert "It is still there" in out
    assert "A table has as many" not in out
    assert "A table has as many blocks as its tokens need" in lab("check", "--tests")[1]
    fault = faults_of("v0_2_block_manager")[0]
    file = lab.folder / "faults" / "v0_2_block_manager" / "block_manager.py"
    file.write_text(file.read_text().replace(fault.new, fault.old))
    code, out, _ = lab("check")
    assert code == 0
    assert "✓ Found: BlockManager.num_blocks_for" in out


def test_a_loop_that_does_not_end_is_told_with_its_line(tmp_path):
    name = "v0_2_block_manager"
    [each] = [each for each in load_ledger(ROOT) if each.name == name]
    start.make(each, [], tmp_path / name)
    file = tmp_path / name / "block_manager.py"
    body = "        while True:\n            num_tokens += 1"
    file.write_text(bodies.with_body(file.read_text(), "BlockManager.append", body, ""))
    report = run(Job(str(tmp_path), name, TASKS[name][1].tests[:1], seconds=15))
    told = "\n".join(first_failure(report))
    assert "A block is taken with the first token that does not fit" in told
    assert "It did not end" in told
    assert re.search(r"block_manager\.py, line \d+, in append", told)


# What a failure says.


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("tests/v0_3/test_scheduler.py::test_sch_6_victims_are_the_newest", "Victims are the newest"),
        ("a::test_stp_1_2_stop_strings[DE-ABC-2]", "Stop strings"),
        ("a::TestAnyOrder::runTest", "RunTest"),
    ],
)
def test_a_tests_name_is_a_sentence(test, said):
    assert sentence(test) == said


PATTERN = "Regex pattern did not match.\n  Expected regex: 'a'\n  Actual message: 'b'"
PLACE = (str(ROOT / "lab" / "x.py"), 7, "check", "assert y")


@pytest.mark.parametrize(
    ("kind", "message", "more", "lines"),
    [
        ("NotImplementedError", "Task 3: LLM.chat. Stuck?", {}, ["LLM.chat is not written yet: it is task 3."]),
        ("AssertionError", "assert 1 == 2", {"compared": ("==", "1", "2")}, ["Expected: 2", "Got:      1"]),
        ("AssertionError", "assert 3 < 2", {"compared": ("<", "3", "2")}, ["Expected: something < 2", "Got:      3"]),
        ("AssertionError", "assert x", {}, ["Expected: this to be true: x"]),
        ("AssertionError", PATTERN, {}, ["a text that matches the pattern 'a'", "Got:      'b'"]),
        ("AssertionError", "a block is lost", {"place": PLACE}, ["An invariant does not hold: a block is lost"]),
        ("Failed", "DID NOT RAISE <class 'ValueError'>", {}, ["Expected: an error of the kind ValueError"]),
        ("TypeError", "no such thing", {}, ["Expected: no error", "Got:      TypeError: no such thing"]),
        ("TypeError", "x", {"place": PLACE}, ["lab/x.py, line 7, in check", "assert y"]),
    ],
)
def test_a_failure_is_told_as_what_was_expected_and_what_came(kind, message, more, lines):
    told = "\n".join(first_failure(Report(failures=[Failure("a::test_it", {}, kind, message, **more)])))
    assert told.startswith("It\n")
    for line in lines:
        assert line in told
