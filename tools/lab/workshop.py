"""The folder `lab/`: the milestones that a learner writes, and how far each is.

    lab/v0_2_block_manager/            a milestone to write
    lab/faults/v0_2_block_manager/     a milestone with a fault to find
    lab/.progress.json                 which of them is open, when each task began and ended, which hints were given

Git ignores it all. `MINI_VLLM_LAB` names another folder.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.lab import bodies
from tools.lab.tasks import ROOT, Function, LabError, Task, tasks_of, version
from tools.milestones import Milestone, find_milestone, load_ledger

NO_LAB = "There is no lab yet. Begin one with `python -m tools.lab start v0_1`."


@dataclass(slots=True)
class Workshop:
    """`folder` is `lab/`, `data` what `.progress.json` holds."""

    folder: Path
    data: dict[str, Any] = field(default_factory=lambda: {"open": None, "labs": {}})

    @classmethod
    def load(cls) -> "Workshop":
        """What is there; a folder that is not there is an empty one."""
        folder = Path(os.environ.get("MINI_VLLM_LAB", ROOT / "lab")).resolve()
        file = folder / ".progress.json"
        try:
            return cls(folder, json.loads(file.read_text(encoding="utf-8"))) if file.exists() else cls(folder)
        except json.JSONDecodeError:
            raise LabError(f"{file} cannot be read. Delete it and run `start` again: your code stays.") from None

    def save(self) -> None:
        """Write `.progress.json`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.data, indent=2) + "\n"
        (self.folder / ".progress.json").write_text(text, encoding="utf-8")

    def open(self, name: str, fault: int | None = None) -> None:
        """Work on this lab from now on, such as `v0_1_single_request` or `faults/v0_1_single_request`."""
        self.data["open"] = name
        self.data["labs"][name] = {"fault": fault, "began": time.time(), "tasks": {}}

    def current(self) -> "Lab":
        """The lab that is open.

        Raises:
            LabError: there is none.
        """
        name = self.data["open"]
        if name is None or not (self.folder / name).is_dir():
            raise LabError(NO_LAB)
        return self.lab(name)

    def lab(self, name: str) -> "Lab":
        """One that is there, open or not."""
        milestone = find_milestone(load_ledger(ROOT), name.split("/")[-1])
        return Lab(self, name, milestone, tasks_of(milestone))


@dataclass(slots=True)
class Lab:
    """One milestone in the workshop."""

    workshop: Workshop
    name: str
    milestone: Milestone
    tasks: list[Task]

    @property
    def folder(self) -> Path:
        """The package."""
        return self.workshop.folder / self.name

    @property
    def title(self) -> str:
        """`v0.2`."""
        return version(self.milestone.name).replace("_", ".")

    @property
    def data(self) -> dict[str, Any]:
        """What is known of it."""
        data: dict[str, Any] = self.workshop.data["labs"][self.name]
        return data

    @property
    def fault(self) -> int | None:
        """The number of the fault that is planted in it, where it is that kind of lab."""
        number: int | None = self.data["fault"]
        return number

    def task_data(self, task: Task) -> dict[str, Any]:
        """When a task began and was done, how many hints were given, and whether the solution was shown."""
        data: dict[str, Any] = self.data["tasks"].setdefault(
            str(task.number), {"began": None, "done": None, "hints": 0, "shown": False}
        )
        return data

    def is_done(self, task: Task) -> bool:
        """Whether its tests have passed."""
        return self.task_data(task)["done"] is not None

    def current_task(self) -> Task | None:
        """The first task that is not done."""
        return next((task for task in self.tasks if not self.is_done(task)), None)

    def begin(self, task: Task) -> None:
        """Start a task's clock, unless it runs."""
        self.task_data(task)["began"] = self.task_data(task)["began"] or time.time()

    def finish(self, task: Task) -> None:
        """Stop its clock, and start the next one's."""
        self.begin(task)
        self.task_data(task)["done"] = self.task_data(task)["done"] or time.time()
        following = self.current_task()
        if following is not None:
            self.begin(following)

    def minutes(self, task: Task) -> float | None:
        """Minutes from a task's beginning to its end, or to now."""
        data = self.task_data(task)
        return None if data["began"] is None else ((data["done"] or time.time()) - data["began"]) / 60

    def path(self, function: Function) -> Path:
        """The learner's file."""
        return self.folder / function.file

    def where(self, function: Function) -> str:
        """The same, for people: from the repository's root, if it is below it."""
        return shown(self.path(function))

    def source(self, function: Function) -> str:
        """The learner's text.

        Raises:
            LabError: the file is gone.
        """
        try:
            return self.path(function).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise LabError(
                f"{self.where(function)} is gone. Start over with `python -m tools.lab start "
                f"{version(self.milestone.name)} --again`, or get it back from where it went."
            ) from None

    def reference(self, function: Function) -> str:
        """The milestone's own text."""
        return (ROOT / self.milestone.name / function.file).read_text(encoding="utf-8")

    def place(self, function: Function) -> str:
        """`lab/v0_2_block_manager/llm.py, line 12`: where the function's body is."""
        where = self.where(function)
        return f"{where}, line {bodies.line_of(self.source(function), function.name, where)}"

    def missing(self, task: Task) -> list[Function]:
        """Which of a task's functions nobody has written yet."""
        return [f for f in task.functions if bodies.is_missing(self.source(f), f.name, self.where(f))]

    def reset(self, task: Task) -> None:
        """Take a task's bodies out again."""
        for function in task.functions:
            self.path(function).write_text(emptied(self.source(function), task, function), encoding="utf-8")
        self.task_data(task).update(began=time.time(), done=None)


def shown(path: Path) -> str:
    """A path for people: from the repository's root, if it is below it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def emptied(source: str, task: Task, function: Function) -> str:
    """A file's text without the body of a task's function."""
    message = f"Task {task.number}: {function.name}. Stuck? python -m tools.lab hint"
    return bodies.without_body(source, function.name, message, function.file)
