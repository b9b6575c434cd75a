"""What the lab's command line does; `__main__.py` reads it. Each command returns the exit code: 0 where all is well."""

import difflib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tools.lab import bodies, start, words
from tools.lab.tasks import ROOT, Function, LabError, Task, all_tasks, find_task, milestone_with_tasks, version
from tools.lab.texts import LEVELS, Fault, Help, faults_of, hints_of
from tools.lab.trial import Job, Report, run
from tools.lab.workshop import NO_LAB, Lab, Workshop, shown

LAB = "python -m tools.lab"


def say(text: str = "", style: str | None = None) -> None:
    """Print a line as it is, in colour where there is any."""
    Console(highlight=False, soft_wrap=True).print(text, style=style, markup=False)


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
    planted = _fault(milestone.name, fault) if fault is not None else None
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
            _tell_carried(previous, *start.carry(previous, target, tasks))
        except LabError:
            shutil.rmtree(target)  # as it was made a moment ago, it holds nobody's work
            raise
    if planted is not None:
        workshop.save()
        return _tell_fault(lab, planted)
    lab.begin(tasks[0])
    workshop.save()
    say(f"{lab.title} is yours to write, in {shown(target)}: {len(tasks)} tasks.", "bold")
    _tell_task(lab, tasks[0])
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
        _tell_task(lab, task)
    say(f"(To begin anew: {LAB} start {version(lab.milestone.name)} --again. What is there is put aside.)", "dim")
    return 0


def _previous(workshop: Workshop, name: str) -> Lab:
    """The latest earlier milestone that was written here."""
    names = list(all_tasks())
    for earlier in reversed(names[: names.index(name)]):
        if earlier in workshop.data["labs"] and (workshop.folder / earlier).is_dir():
            opened = Workshop(workshop.folder, workshop.data | {"open": earlier})
            return opened.current()
    raise LabError(f"There is no earlier lab to go on from: `{LAB} start {version(name)}` begins without one.")


def _tell_carried(previous: Lab, carried: Sequence[str], left: Sequence[str]) -> None:
    say(f"From your {previous.title}: {', '.join(carried) or 'nothing'}.")
    if left:
        say(
            f"Not these, as the lesson changes the same lines: {', '.join(left)}. They are as this milestone has them; "
            f"yours are still in {shown(previous.folder)}."
        )


def _fault(milestone: str, number: int) -> Fault:
    faults = faults_of(milestone)
    if not 1 <= number <= len(faults):
        raise LabError(f"{version(milestone)} has faults 1 to {len(faults)}, not {number}.")
    return faults[number - 1]


def check(name: str | None, *, every: bool, tests: bool, verbose: bool) -> int:
    """`check`."""
    lab = Workshop.load().current()
    if lab.fault is not None:
        return _check_fault(lab, _fault(lab.milestone.name, lab.fault), tests=tests, verbose=verbose)
    if every:
        return _check_every(lab, verbose)
    task = lab.current_task() if name is None else find_task(lab.tasks, name)
    if task is None:
        return _check_every(lab, verbose)
    lab.begin(task)
    lab.workshop.save()
    for file in {function.file: function for function in task.functions}.values():
        bodies.parse(lab.source(file), lab.where(file))
    if missing := lab.missing(task):
        say(f"Task {task.number} of {len(lab.tasks)}: {task.title}", "bold")
        say("  Not written yet:")
        for function in missing:
            say(f"    {function.name}   {lab.place(function)}")
        say("  These tests will say when it is right:")
        for test in task.tests:
            say(f"    {words.sentence(test)}")
        say(f"Write it, then check again. Stuck? {LAB} hint")
        return 1
    report = _run(lab, task.tests, hints_of(lab.milestone.name)[task.number - 1].runs, verbose)
    if not report.is_green:
        say(f"Task {task.number} of {len(lab.tasks)}: {task.title}", "bold")
        _tell_failure(report, verbose)
        say(f"Change it, then check again. Stuck? {LAB} hint")
        return 1
    was_done = lab.is_done(task)
    lab.finish(task)
    lab.workshop.save()
    _tell_success(lab, task, report)
    following = lab.current_task()
    if following is not None:
        say()
        _tell_task(lab, following)
        return 0
    return 0 if was_done else _check_every(lab, verbose)


def _run(lab: Lab, tests: Sequence[str], runs: str = "", verbose: bool = False) -> Report:
    return run(Job(str(lab.folder.parent), lab.milestone.name, tests, runs, verbose))


def _check_every(lab: Lab, verbose: bool) -> int:
    """The tests of all tasks that are done, and at the end of a milestone those with the real model."""
    done = [task for task in lab.tasks if lab.is_done(task)]
    if not done:
        raise LabError(f"No task is done yet: `{LAB} check` looks at the first.")
    tests = list(dict.fromkeys(test for task in done for test in task.tests))
    is_whole = len(done) == len(lab.tasks)
    real = [test for task in done for test in task.real] if is_whole and _has_model() else []
    say(f"All tests of {len(done)} tasks" + (", and the real model" if real else "") + " ...")
    report = _run(lab, [*tests, *real], verbose=verbose)
    if not report.is_green:
        _tell_failure(report, verbose)
        return 1
    say(f"{len(report.passed)} tests pass.", "green")
    if is_whole:
        if not real:
            say("(The real model is not installed, so its tests did not run: `make demo` installs it.)")
        say(f'{lab.title} is written, and by you. Run it: {LAB} run "Why is the sky blue?"', "bold green")
        names = list(all_tasks())
        later = names[names.index(lab.milestone.name) + 1 :]
        if later:
            say(f"Next: {LAB} start {version(later[0])} --through")
    return 0


def _has_model() -> bool:
    from common.errors import ModelError
    from common.weights import resolve

    try:
        return resolve(None).exists()
    except ModelError:
        return False


def _tell_failure(report: Report, verbose: bool) -> None:
    if verbose:
        say(report.said)
    if not report.failures and report.stuck is None:
        say(f"  The tests did not run. What they said:\n{report.said[-2000:]}")
        return
    total = len(report.passed) + len(report.failures)
    if report.stuck is None:
        say(f"  {len(report.passed)} of {total} tests pass. The first that does not:")
    say()
    for line in words.first_failure(report):
        say(f"  {line}")
    say()


def _tell_success(lab: Lab, task: Task, report: Report) -> None:
    minutes = lab.minutes(task) or 0.0
    tests = f"{len(report.passed)} tests pass" if len(report.passed) > 1 else "its test passes"
    say(f"✓ Task {task.number} of {len(lab.tasks)}, {task.title}: {tests}. {_minutes(minutes)}.", "bold green")
    if report.shown:
        say("What runs now:")
        for line in hints_of(lab.milestone.name)[task.number - 1].runs.split("\n"):
            say(f"  {line}", "dim")
        say()
        for line in report.shown.rstrip("\n").split("\n"):
            say(f"  {line}")


def _tell_task(lab: Lab, task: Task) -> None:
    say(f"Task {task.number} of {len(lab.tasks)}: {task.title} (about {task.minutes} minutes)", "bold")
    for function in task.functions:
        say(f"  {function.name}   {lab.place(function)}")
    page = f"docs/milestones/{version(lab.milestone.name)}.md"
    say(f"  The docstring says what it does, the lesson why ({page}). When it is written: {LAB} check")


def _minutes(minutes: float) -> str:
    return "Less than a minute" if minutes < 1 else "1 minute" if minutes < 2 else f"{minutes:.0f} minutes"


def hint(name: str | None) -> int:
    """`hint`: each call gives the next."""
    lab = Workshop.load().current()
    if lab.fault is not None:
        texts, data = _fault(lab.milestone.name, lab.fault).help, lab.data
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
        functions: Sequence[Function] = [_fault(lab.milestone.name, lab.fault).function]
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
        lab = Workshop(workshop.folder, workshop.data | {"open": key}).current()
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
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(lab.folder.parent), str(ROOT)]),
        "PYTHONSAFEPATH": "1",
    }
    return subprocess.run([sys.executable, "-m", lab.milestone.name, *arguments], env=environment).returncode


def _tell_fault(lab: Lab, fault: Fault) -> int:
    say(f"{lab.title}, fault {fault.number}: somewhere in {shown(lab.folder)} one thing is wrong.", "bold")
    say()
    say(fault.symptom)
    _tell_symptom(fault.help, _run(lab, [], fault.help.runs))
    say()
    say(f"Find it by reading and trying, and mend it. Then: {LAB} check")
    say("It won't tell you which tests see the fault, unless you ask for that with --tests.", "dim")
    return 0


def _tell_symptom(texts: Help, report: Report) -> None:
    say()
    for line in texts.runs.split("\n"):
        say(f"  {line}", "dim")
    say()
    for line in report.shown.rstrip("\n").split("\n"):
        say(f"  {line}")


def _check_fault(lab: Lab, fault: Fault, *, tests: bool, verbose: bool) -> int:
    for file in sorted(lab.folder.rglob("*.py")):
        bodies.parse(file.read_text(encoding="utf-8"), shown(file))
    report = _run(lab, fault.tests, fault.help.runs, verbose)
    if report.is_green:
        lab.data["done"] = time.time()
        lab.workshop.save()
        say(f"✓ Found: {fault.function.name} in {fault.function.file}.", "bold green")
        say(fault.why)
        return 0
    say("It is still there: not every test that sees it passes.", "bold")
    if tests or verbose:
        _tell_failure(report, verbose)
    else:
        say(fault.symptom)
        say(f"To see what the tests say: {LAB} check --tests. For a hint: {LAB} hint")
    return 1
