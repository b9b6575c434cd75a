"""Make a lab from a milestone: a copy without the bodies of its tasks, or with a fault planted.

`carried` brings earlier work along. It is the three-way merge of `tools.ledger carry`, with the learner's file in the
place of a milestone's own:

    the previous milestone ──── the lesson's change ───▶ this milestone, its tasks taken out
              │                                                     │
      the learner's change                                  the learner's change
              ▼                                                     ▼
    the learner's previous lab ────── merged ──────────▶ the new lab
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.carry import merge
from tools.lab import bodies
from tools.lab.tasks import ROOT, Function, LabError, Task
from tools.lab.texts import Fault
from tools.lab.workshop import Lab, emptied
from tools.milestones import Milestone

LEFT_OUT = shutil.ignore_patterns("__pycache__", "measurements", ".*")


def make(milestone: Milestone, tasks: Sequence[Task], target: Path) -> None:
    """Write a milestone without its tasks' bodies; everything else byte by byte."""
    _copy(milestone, target)
    for task in tasks:
        for function in task.functions:
            file = target / function.file
            _write(file, emptied(_read(file), task, function))


def make_faulty(milestone: Milestone, fault: Fault, target: Path) -> None:
    """Write a milestone with a fault in it."""
    _copy(milestone, target)
    file, function = target / fault.function.file, fault.function
    _write(file, bodies.planted(_read(file), function.name, fault.old, fault.new, function.file))


def put_aside(target: Path) -> Path | None:
    """Give a folder that is there another name, which is returned: nobody's work is ever deleted."""
    if not target.exists():
        return None
    number = 1
    while (aside := target.with_name(f"{target.name}.old{number}")).exists():
        number += 1
    target.rename(aside)
    return aside


@dataclass(slots=True)
class Carried:
    """What became of the functions of an earlier lab, each as its file and its name.

    `changed` are as the new milestone has them, since the lesson changes the same lines. `gone` are not in it.
    """

    carried: list[Function] = field(default_factory=list)
    changed: list[Function] = field(default_factory=list)
    gone: list[Function] = field(default_factory=list)


def carry(previous: Lab, target: Path, tasks: Sequence[Task]) -> Carried:
    """Bring what was written in an earlier lab into a new one that `make` has just made.

    Raises:
        LabError: a file of the earlier lab is no Python.
    """
    result = Carried()
    for file in dict.fromkeys(function.file for task in previous.tasks for function in task.functions):
        written = [
            function
            for task in previous.tasks
            for function in task.functions
            if function.file == file and function not in previous.missing(task)
        ]
        rewritten = {function.name for task in tasks for function in task.functions if function.file == file}
        wanted = [function for function in written if function.name not in rewritten]
        if not (target / file).is_file():
            result.gone += wanted
            continue
        kept = [function for function in wanted if _is_in(_read(target / file), function)]
        text, failed = _merged(previous, target, file, kept)
        _write(target / file, text)
        result.carried += [function for function in kept if function not in failed]
        result.changed += failed
        result.gone += [function for function in wanted if function not in kept]
    return result


def _is_in(source: str, function: Function) -> bool:
    try:
        bodies.find(source, function.name, function.file)
    except LabError:
        return False
    return True


def _merged(previous: Lab, target: Path, file: str, wanted: Sequence[Function]) -> tuple[str, list[Function]]:
    """One file with the learner's work, and the functions whose work could not be merged."""
    base, theirs = _read(ROOT / previous.milestone.name / file), _read(target / file)
    mine, where = _read(previous.folder / file), str(previous.folder / file)
    bodies.parse(mine, where)
    # A function that was never written, or is to be written again, is as the milestone had it: no change of mine.
    for task in previous.tasks:
        for function in task.functions:
            if function.file == file and function not in wanted:
                mine = _as_in(base, mine, function, where)
    failed: list[Function] = []
    for _ in range(len(wanted) + 1):
        text = _merge(mine, base, theirs)
        if text is not None:
            return text, failed
        # Give up one function's work: the first without which it can be merged, or else the first that is left.
        candidates = [function for function in wanted if function not in failed]
        if not candidates:
            break
        alone = [f for f in candidates if _merge(_as_in(base, mine, f, where), base, theirs) is not None]
        failed.append((alone or candidates)[0])
        mine = _as_in(base, mine, failed[-1], where)
    return theirs, list(wanted)


def _as_in(base: str, mine: str, function: Function, where: str) -> str:
    return bodies.with_body(mine, function.name, bodies.body(base, function.name, where), where)


def _merge(mine: str, base: str, theirs: str) -> str | None:
    """The merged text, if it is clean, and Python."""
    is_clean, merged = merge(mine.encode(), base.encode(), theirs.encode(), ("yours", "before", "now"))
    if not is_clean:
        return None
    try:
        bodies.parse(merged.decode(), "the merged file")
    except LabError:
        return None
    return merged.decode()


def _copy(milestone: Milestone, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / milestone.name, target, ignore=LEFT_OUT)


def _read(file: Path) -> str:
    return file.read_bytes().decode()  # no translation of line ends: what is not taken out stays byte by byte


def _write(file: Path, text: str) -> None:
    file.write_bytes(text.encode())
