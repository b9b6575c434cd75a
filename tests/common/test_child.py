"""A process that answers JSON with JSON, and stands still while it is asked nothing."""

import sys
import time
from pathlib import Path

import pytest

from common.errors import ModelError
from common.measuring.child import Child

ECHO = """
import json, sys
print("loading")
for line in sys.stdin:
    print("RESULT " + json.dumps({"got": json.loads(line)}), flush=True)
"""


def state(pid: int) -> str:
    """`T` is a stopped process, by Linux's /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(pid: int, wanted: str) -> None:
    end = time.monotonic() + 20
    while state(pid) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    assert state(pid) == wanted


def test_a_child_answers_each_question_and_other_lines_are_passed_over():
    with Child("echo", [sys.executable, "-c", ECHO]) as child:
        assert child.ask({"a": 1}) == {"got": {"a": 1}}
        assert child.ask([2]) == {"got": [2]}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_a_child_is_stopped_between_two_questions_and_ends_when_it_is_closed():
    child = Child("echo", [sys.executable, "-c", ECHO])
    child.ask(1)
    until(child.process.pid, "T")
    child.ask(2)
    until(child.process.pid, "T")
    child.close()
    assert child.process.returncode == 0


def test_a_child_that_ends_is_an_error_with_its_last_words():
    with (
        Child("poor", [sys.executable, "-c", "import sys; sys.exit('there is no model')"]) as child,
        pytest.raises(ModelError, match=r"poor has ended with exit code 1:\nthere is no model"),
    ):
        child.ask(1)


def test_a_command_that_cannot_be_started_is_an_error():
    with pytest.raises(ModelError, match="engine cannot be started: /no/python: No such file"):
        Child("engine", ["/no/python"])


def test_the_environment_and_the_folder_are_the_childs(tmp_path):
    code = "import os, json; input(); print('RESULT ' + json.dumps([os.environ['GREETING'], os.getcwd()]))"
    with Child("env", [sys.executable, "-c", code], environment={"GREETING": "hello"}, cwd=tmp_path) as child:
        assert child.ask(None) == ["hello", str(tmp_path)]


def test_a_child_that_has_ended_is_noticed_though_what_it_started_holds_its_output():
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '300']).pid, file=sys.stderr); sys.exit(3)"
    with Child("core", [sys.executable, "-c", code]) as child:
        with pytest.raises(ModelError, match="core has ended with exit code 3"):
            child.ask(1)
        grandchild = int(child.said())
    end = time.monotonic() + 20
    while Path(f"/proc/{grandchild}").exists() and state(grandchild) != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{grandchild}").exists() or state(grandchild) == "Z"
