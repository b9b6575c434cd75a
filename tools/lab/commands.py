"""The commands but `check`; `__main__.py` reads the command line. Each returns the exit code: 0 where all is well."""

import difflib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tools.lab import bodies, start
from tools.lab.tasks import Function, LabError, all_tasks, find_task, milestone_with_tasks, version
from tools.lab.telling import LAB, run_tests, say, tell_symptom, tell_task
from tools.lab.texts import LEVELS, Fault, hints_of, planted_in
from tools.lab.trial import lab_first
from tools.lab.workshop import NO_LAB, Lab, Workshop, shown


def begin(name: str, *, through: bool, fault: int | None, again: bool) -> int:
    """`start`."""
    if through and fault is not None:
        raise LabError("--through and --fault do not go together: a fault is planted in the milestone as it is.")
    milestone, tasks = milestone_with_tasks(name)
    workshop = Workshop.load()
    key = milestone.name if fault is None else f"faults/{milestone.name}"
    target = workshop.folder / key
    if target.exists() and not again and fault is None:
        return _open_again(workshop, key)
    planted = planted_in(milestone.name, fault) if fault is not None else None
    previous = _previous(workshop, milestone.name) if through else None
    aside = start.put_aside(target)
    if aside is not None:
        say(f"What was there is now in {shown(aside)}.")
    if planted is not None:
        start.make_faulty(milestone, planted, target)
    else:
        start.make(milestone, tasks, target)
    workshop.open(key, fault)
    lab = workshop.current()
    if previous is not None:
        try:
            _tell_carried(previous, lab.title, start.carry(previous, target, tasks))
        except LabError:
            shutil.rmtree(target)  # as it was made a moment ago, it holds nobody's work
            raise
    if planted is not None:
        workshop.save()
        return _tell_fault(lab, planted)
    lab.begin(tasks[0])
    workshop.save()
    say(f"{lab.title} is yours to write, in {shown(target)}: {len(tasks)} tasks.", "bold")
    tell_task(lab, tasks[0])
    return 0


def _open_again(workshop: Workshop, key: str) -> int:
    if key in workshop.data["labs"]:
        workshop.data["open"] = key
    else:
        workshop.open(key)  # `.progress.json` was deleted
    workshop.save()
    lab = workshop.current()
    num_done = sum(map(lab.is_done, lab.tasks))
    say(f"{lab.title} is open again: {num_done} of {len(lab.tasks)} tasks are done.", "bold")
    task = lab.current_task()
    if task is not None:
        tell_task(lab, task)
    say(f"(To begin anew: {LAB} start {version(lab.milestone.name)} --again. What is there is put aside.)", "dim")
    return 0


def _previous(workshop: Workshop, name: str) -> Lab:
    """The latest earlier milestone that was written here."""
    names = list(all_tasks())
    for earlier in reversed(names[: names.index(name)]):
        if earlier in workshop.data["labs"] and (workshop.folder / earlier).is_dir():
            return workshop.lab(earlier)
    raise LabError(f"There is no earlier lab to go on from: `{LAB} start {version(name)}` begins without one.")


def _tell_carried(previous: Lab, title: str, result: start.Carried) -> None:
    def names(functions: Sequence[Function]) -> str:
        files = dict.fromkeys(function.file for function in functions)
        return "; ".join(f"{file}: {', '.join(f.name for f in functions if f.file == file)}" for file in files)

    if result.carried:
        say(f"Brought along from your {previous.title}: {names(result.carried)}.")
    else:
        say(f"Nothing of your {previous.title} could be brought along.")
    if result.changed:
        say(f"{title} changes the same lines of these, so they are as it has them: {names(result.changed)}.")
    if result.gone:
        say(f"{title} has no such functions any more: {names(result.gone)}.")
    say(f"All of yours are still in {shown(previous.folder)}.", "dim")


def _tell_fault(lab: Lab, fault: Fault) -> int:
    say(f"{lab.title}, fault {fault.number}: somewhere in {shown(lab.folder)} one thing is wrong.", "bold")
    say()
    say(fault.symptom)
    tell_symptom(fault.help, run_tests(lab, [], fault.help.runs))
    say()
    say(f"Find it by reading and trying, and mend it. Then: {LAB} check")
    say("It won't tell you which tests see the fault, unless you ask for that with --tests.", "dim")
    return 0


def hint(name: str | None) -> int:
    """`hint`: each call gives the next."""
    lab = Workshop.load().current()
    if lab.fault is not None:
        texts, data = planted_in(lab.milestone.name, lab.fault).help, lab.data
        data.setdefault("hints", 0)
        heading = f"{lab.title}, fault {lab.fault}"
    else:
        task = lab.current_task() if name is None else find_task(lab.tasks, name)
        if task is None:
            raise LabError(f"All tasks are done. `{LAB} hint TASK` shows the hints of one.")
        texts, data = hints_of(lab.milestone.name)[task.number - 1], lab.task_data(task)
        heading = f"Task {task.number}: {task.title}"
    data["hints"] = min(data["hints"] + 1, len(LEVELS))
    lab.workshop.save()
    say(heading, "bold")
    for number, (level, text) in enumerate(zip(LEVELS, texts.hints, strict=True), 1):
        if number <= data["hints"]:
            say(f"{number}. {level}", "bold dim")
            for line in text.split("\n"):
                say(f"   {line}")
    if data["hints"] < len(LEVELS):
        say(f"({len(LEVELS) - data['hints']} more: the same command again.)", "dim")
    elif lab.fault is None:
        say(f"(That was the last. `{LAB} show` has the whole solution.)", "dim")
    return 0


def show(name: str | None) -> int:
    """`show`: the reference's bodies against the learner's."""
    lab = Workshop.load().current()
    if lab.fault is not None:
        functions: Sequence[Function] = [planted_in(lab.milestone.name, lab.fault).function]
    else:
        task = lab.current_task() if name is None else find_task(lab.tasks, name)
        if task is None:
            raise LabError(f"All tasks are done. `{LAB} show TASK` compares one with the milestone's own.")
        functions = task.functions
        lab.task_data(task)["shown"] = True
        lab.workshop.save()
    for function in functions:
        mine, theirs = lab.source(function), lab.reference(function)
        where = lab.where(function)
        old = bodies.body(mine, function.name, where).split("\n")
        new = bodies.body(theirs, function.name, where).split("\n")
        ours, reference = f"{where}, {function.name}: yours", f"{lab.milestone.name}/{function.file}: the milestone's"
        if old == new:
            say(f"{function.name}: yours is the milestone's, line by line.")
            continue
        for line in difflib.unified_diff(old, new, ours, reference, n=99, lineterm=""):
            if not line.startswith("@@"):
                say(line, {"+": "green", "-": "red"}.get(line[:1]))
    return 0


def status() -> int:
    """`status`: all tasks of all labs."""
    workshop = Workshop.load()
    if not workshop.data["labs"]:
        raise LabError(NO_LAB)
    opened = workshop.data["open"]
    for key in workshop.data["labs"]:
        if not (workshop.folder / key).is_dir():
            continue
        lab = workshop.lab(key)
        title = f"{key}{' (open)' if key == opened else ''}"
        if lab.fault is not None:
            say(f"{title}: fault {lab.fault}, {'found' if lab.data.get('done') else 'not found yet'}", "bold")
            continue
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("", "task", "to write", "minutes", "about", "hints"):
            table.add_column(heading, justify="right" if heading in ("minutes", "about", "hints") else "left")
        current = lab.current_task()
        for task in lab.tasks:
            data, minutes = lab.task_data(task), lab.minutes(task)
            mark = "✓" if lab.is_done(task) else "▸" if task is current else " "
            spent = "" if minutes is None else f"{minutes:.0f}"
            hints = f"{data['hints'] or ''}{' shown' if data['shown'] else ''}"
            table.add_row(mark, f"{task.number}. {task.title}", task.short_names, spent, str(task.minutes), hints)
        Console(highlight=False).print(table)
    return 0


def reset(name: str) -> int:
    """`reset`: a task's bodies are taken out again."""
    lab = Workshop.load().current()
    if lab.fault is not None:
        raise LabError(f"A fault has no tasks: `{LAB} start {lab.title} --fault {lab.fault}` plants it again.")
    task = find_task(lab.tasks, name)
    lab.reset(task)
    lab.workshop.save()
    say(f"Task {task.number} is to be written again: {task.names}.")
    return 0


def run_milestone(arguments: Sequence[str]) -> int:
    """`run`: the milestone's own command line, with the lab's code."""
    lab = Workshop.load().current()
    environment = os.environ | lab_first(str(lab.folder.parent))
    return subprocess.run([sys.executable, "-m", lab.milestone.name, *arguments], env=environment).returncode
