"""What a learner may write: the tasks of each milestone, from the `lab = [...]` of its table in `pyproject.toml`.

    lab = [
        { title = "Count tokens", minutes = 10, write = ["request.py Request.num_tokens"], tests = [
            "test_request.py::test_a_request_counts_its_tokens",
        ] },
    ]

`write` names functions, each by its file and its dotted name. `tests` are tests of the milestone: they fail without the
functions and pass with them, whatever the later tasks have left to do. `minutes` is a guess. The last task may also
have `real`: tests with the real model, for when everything else is done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.milestones import LedgerError, Milestone, find_milestone, load_ledger

ROOT = Path(__file__).parents[2]
KEYS = ("title", "minutes", "write", "tests", "real")


class LabError(Exception):
    """A command cannot be done as asked: the message says why, and what to do next."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a milestone: its file, relative to the milestone, and its dotted name inside it."""

    file: str
    name: str


@dataclass(frozen=True, slots=True)
class Task:
    """One step of a lab; `number` counts from 1. `tests` and `real` are ids for pytest, relative to the repository."""

    milestone: str
    number: int
    title: str
    minutes: int
    functions: tuple[Function, ...]
    tests: tuple[str, ...]
    real: tuple[str, ...] = ()

    @property
    def names(self) -> str:
        """The functions, for people."""
        return ", ".join(function.name for function in self.functions)

    @property
    def short_names(self) -> str:
        """The functions without their classes, for a narrow column."""
        return ", ".join(function.name.split(".")[-1] for function in self.functions)


def version(milestone: str) -> str:
    """`v0_3_scheduler` as `v0_3`: the folder of its tests, and the stem of its files here."""
    return "_".join(milestone.split("_")[:2])


def all_tasks(root: Path = ROOT) -> dict[str, list[Task]]:
    """The tasks of every milestone that has some, in the order of the ledger.

    Raises:
        LedgerError: an entry is not as it should be.
    """
    return {milestone.name: tasks_of(milestone) for milestone in load_ledger(root) if milestone.lab}


def tasks_of(milestone: Milestone) -> list[Task]:
    """One milestone's tasks, in order."""
    return [_task(milestone.name, number, table) for number, table in enumerate(milestone.lab, 1)]


def _task(milestone: str, number: int, table: Mapping[str, Any]) -> Task:
    where = f"pyproject.toml, [tool.milestones.{milestone}], task {number} of lab"
    if unknown := sorted(table.keys() - set(KEYS)):
        raise LedgerError(f"{where}: unknown key {unknown[0]!r}; a task has {', '.join(KEYS)}.")
    if not isinstance(table.get("title"), str) or not isinstance(table.get("minutes"), int):
        raise LedgerError(f"{where}: title must be a text and minutes a number.")
    lists = {key: table.get(key, []) for key in ("write", "tests", "real")}
    for key, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise LedgerError(f"{where}: {key} must be a list of texts.")
        if not value and key != "real":
            raise LedgerError(f"{where}: {key} is empty: a task has something to write, and tests that teach it.")
    functions = []
    for entry in lists["write"]:
        if len(entry.split()) != 2:
            raise LedgerError(f"{where}: write {entry!r} must be a file and a function, 'llm.py LLM.generate'.")
        functions.append(Function(*entry.split()))
    folder = f"tests/{version(milestone)}"
    return Task(
        milestone,
        number,
        table["title"],
        table["minutes"],
        tuple(functions),
        tuple(f"{folder}/{test}" for test in lists["tests"]),
        tuple(f"{folder}/{test}" for test in lists["real"]),
    )


def milestone_with_tasks(name: str, root: Path = ROOT) -> tuple[Milestone, list[Task]]:
    """The milestone of this name, which may be cut short (`v0_2`, or `v0.2`), and its tasks.

    Raises:
        LabError: there is no such milestone, or it has no tasks.
    """
    milestones = load_ledger(root)
    with_tasks = ", ".join(version(milestone.name) for milestone in milestones if milestone.lab)
    try:
        milestone = find_milestone(milestones, name.replace(".", "_"))
    except LedgerError:
        raise LabError(f"There is no milestone {name}. The lab has tasks for {with_tasks}.") from None
    if not milestone.lab:
        raise LabError(f"{version(milestone.name)} has nothing to write. The lab has tasks for {with_tasks}.")
    return milestone, tasks_of(milestone)


def find_task(tasks: Sequence[Task], name: str) -> Task:
    """The task of this number, or the one with a function of this name (`allocate`, or `BlockManager.allocate`).

    Raises:
        LabError: none has it, or several have.
    """
    found = [
        task
        for task in tasks
        if name == str(task.number)
        or any(name in (function.name, function.name.split(".")[-1]) for function in task.functions)
    ]
    if len(found) != 1:
        known = "; ".join(f"{task.number} ({task.names})" for task in tasks)
        raise LabError(f"{name} names {'no task' if not found else 'several tasks'}. There are: {known}.")
    return found[0]
