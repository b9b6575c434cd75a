"""The texts of the lab: `hints/v0_N.toml` helps with tasks, `faults/v0_N.toml` has faults to find.

Hints, a table for each task, in their order:

    [[task]]
    question = "What to ask yourself."
    idea = "What to do."
    shape = "The code's outline."
    runs = "Python that shows what works once the task is done; its output is printed."

Faults, a table for each:

    [[fault]]
    function = "block_manager.py BlockManager.free"     where it is planted
    old = "..."                                         the expression or statement there
    new = "..."                                         what takes its place
    symptom = "What somebody would report."
    shows = "Python that shows the symptom."
    question, idea, shape                               hints, as above
    tests = ["test_block_manager.py::test_..."]         which see it
    why = "What was wrong, for the end."
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.lab.tasks import Function, LabError, version

HERE = Path(__file__).parent
LEVELS = ("question", "idea", "shape")


@dataclass(frozen=True, slots=True)
class Help:
    """The three hints of a task or a fault, and Python that shows something."""

    question: str
    idea: str
    shape: str
    runs: str

    @property
    def hints(self) -> tuple[str, str, str]:
        """In the order in which they are given."""
        return self.question, self.idea, self.shape


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to find; `number` counts from 1."""

    number: int
    function: Function
    old: str
    new: str
    symptom: str
    why: str
    tests: tuple[str, ...]
    help: Help


def hints_of(milestone: str) -> list[Help]:
    """The hints of a milestone's tasks, in their order."""
    return [_help(table, "runs") for table in _read("hints", milestone, "task")]


def faults_of(milestone: str) -> list[Fault]:
    """The faults of a milestone; there may be none."""
    folder = f"tests/{version(milestone)}"
    return [
        Fault(
            number,
            Function(*table["function"].split()),
            table["old"],
            table["new"],
            table["symptom"].strip(),
            table["why"].strip(),
            tuple(f"{folder}/{test}" for test in table["tests"]),
            _help(table, "shows"),
        )
        for number, table in enumerate(_read("faults", milestone, "fault"), 1)
    ]


def planted_in(milestone: str, number: int) -> Fault:
    """The fault of this number.

    Raises:
        LabError: there is none.
    """
    faults = faults_of(milestone)
    if not 1 <= number <= len(faults):
        raise LabError(f"{version(milestone)} has faults 1 to {len(faults)}, not {number}.")
    return faults[number - 1]


def _help(table: dict[str, Any], code: str) -> Help:
    question, idea, shape = (table[level].strip() for level in LEVELS)
    return Help(question, idea, shape, table[code].strip())


def _read(folder: str, milestone: str, key: str) -> list[dict[str, Any]]:
    file = HERE / folder / f"{version(milestone)}.toml"
    if not file.is_file():
        return []
    tables: list[dict[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))[key]
    return tables
