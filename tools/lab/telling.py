"""What the commands print, and how they run tests."""

import ast
from collections.abc import Sequence

from rich.console import Console

from tools.lab import bodies, words
from tools.lab.tasks import Function, Task, version
from tools.lab.texts import Help, hints_of
from tools.lab.trial import Job, Report, run
from tools.lab.workshop import Lab

LAB = "python -m tools.lab"


def say(text: str = "", style: str | None = None) -> None:
    """Print a line as it is, in colour where there is any."""
    Console(highlight=False, soft_wrap=True).print(text, style=style, markup=False)


def run_tests(lab: Lab, tests: Sequence[str], runs: str = "", verbose: bool = False) -> Report:
    """Tests of the milestone, against the lab."""
    return run(Job(str(lab.folder.parent), lab.milestone.name, tests, runs, verbose))


def tell_task(lab: Lab, task: Task) -> None:
    """What a task asks for, and where."""
    say(f"Task {task.number} of {len(lab.tasks)}: {task.title} (about {task.minutes} minutes)", "bold")
    for function in task.functions:
        say(f"  {function.name}   {lab.place(function)}")
        say(f"      {purpose(lab, function)}", "dim")
    say(f"  The lesson is docs/milestones/{version(lab.milestone.name)}.md. When it is written: {LAB} check")


def purpose(lab: Lab, function: Function) -> str:
    """The first line of a function's docstring."""
    node = bodies.find(lab.source(function), function.name, lab.where(function))
    docstring = ast.get_docstring(node)
    return docstring.split("\n")[0] if docstring else f"It has no docstring: its hints say what it does ({LAB} hint)."


def _minutes(minutes: float) -> str:
    return "Less than a minute" if minutes < 1 else "1 minute" if minutes < 2 else f"{minutes:.0f} minutes"


def tell_success(lab: Lab, task: Task, report: Report) -> None:
    """A task is done: what runs now."""
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


def tell_failure(report: Report, verbose: bool) -> None:
    """The first test that fails, and all of pytest's words if they are wanted."""
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


def tell_symptom(texts: Help, report: Report) -> None:
    """What shows a fault, and what it shows."""
    say()
    for line in texts.runs.split("\n"):
        say(f"  {line}", "dim")
    say()
    for line in report.shown.rstrip("\n").split("\n"):
        say(f"  {line}")
