"""`check`: the tests of a task, of all that are done, or of a fault. Returns the exit code: 0 where all is well."""

import time

from tools.lab import bodies, words
from tools.lab.tasks import LabError, all_tasks, find_task, version
from tools.lab.telling import LAB, run_tests, say, tell_failure, tell_success, tell_task
from tools.lab.texts import Fault, hints_of, planted_in
from tools.lab.workshop import Lab, Workshop, shown


def check(name: str | None, *, every: bool, tests: bool, verbose: bool) -> int:
    """`check`."""
    lab = Workshop.load().current()
    if lab.fault is not None:
        return _check_fault(lab, planted_in(lab.milestone.name, lab.fault), tests=tests, verbose=verbose)
    if every:
        return check_every(lab, verbose)
    task = lab.current_task() if name is None else find_task(lab.tasks, name)
    if task is None:
        return check_every(lab, verbose)
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
    report = run_tests(lab, task.tests, hints_of(lab.milestone.name)[task.number - 1].runs, verbose)
    if not report.is_green:
        say(f"Task {task.number} of {len(lab.tasks)}: {task.title}", "bold")
        tell_failure(report, verbose)
        say(f"Change it, then check again. Stuck? {LAB} hint")
        return 1
    was_done = lab.is_done(task)
    lab.finish(task)
    lab.workshop.save()
    tell_success(lab, task, report)
    following = lab.current_task()
    if following is not None:
        say()
        tell_task(lab, following)
        return 0
    return 0 if was_done else check_every(lab, verbose)


def check_every(lab: Lab, verbose: bool) -> int:
    """The tests of all tasks that are done, and at the end of a milestone those with the real model."""
    done = [task for task in lab.tasks if lab.is_done(task)]
    if not done:
        raise LabError(f"No task is done yet: `{LAB} check` looks at the first.")
    tests = list(dict.fromkeys(test for task in done for test in task.tests))
    is_whole = len(done) == len(lab.tasks)
    real = [test for task in done for test in task.real] if is_whole and _has_model() else []
    say(f"All tests of {len(done)} tasks" + (", and the real model" if real else "") + " ...")
    report = run_tests(lab, [*tests, *real], verbose=verbose)
    if not report.is_green:
        tell_failure(report, verbose)
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


def _check_fault(lab: Lab, fault: Fault, *, tests: bool, verbose: bool) -> int:
    for file in sorted(lab.folder.rglob("*.py")):
        bodies.parse(file.read_text(encoding="utf-8"), shown(file))
    report = run_tests(lab, fault.tests, fault.help.runs, verbose)
    if report.is_green:
        lab.data["done"] = time.time()
        lab.workshop.save()
        say(f"✓ Found: {fault.function.name} in {fault.function.file}.", "bold green")
        say(fault.why)
        return 0
    say("It is still there: not every test that sees it passes.", "bold")
    if tests or verbose:
        tell_failure(report, verbose)
    else:
        say(fault.symptom)
        say(f"To see what the tests say: {LAB} check --tests. For a hint: {LAB} hint")
    return 1
