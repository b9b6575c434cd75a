"""Nothing in the lab drifts from the milestones: a task's tests need its functions, and nothing later; faults are seen.

Each version of a milestone is made as the lab makes it, and goes through the milestone's own tests.
"""

from pathlib import Path

import pytest

from tests.kit.lab_variants import Runner, runner
from tools.lab import start
from tools.lab.tasks import all_tasks, milestone_with_tasks
from tools.lab.texts import faults_of, hints_of
from tools.lab.trial import Job, Report

SECONDS = 30  # for one test
SOON = 5  # where a test is to fail, one that waits for what cannot come has failed
MILESTONES = list(all_tasks())


@pytest.fixture(scope="module")
def run_jobs():
    with runner() as run:
        yield run


def failed(report: Report) -> set[str]:
    """The tests of which some case fails, without its parameters."""
    tests = {failure.test.partition("[")[0] for failure in report.failures}
    return tests | ({report.stuck[0].partition("[")[0]} if report.stuck else set())


@pytest.mark.parametrize("name", MILESTONES)
def test_the_tests_of_each_task_need_its_functions_and_none_of_the_later_tasks(
    run_jobs: Runner, tmp_path: Path, name: str
) -> None:
    milestone, tasks = milestone_with_tasks(name)
    jobs, checks = [], []

    def add(missing, task, check, runs="", **options):
        folder = tmp_path / str(len(jobs))
        start.make(milestone, missing, folder / name)
        jobs.append(Job(str(folder), name, task.tests, runs, **{"seconds": SECONDS} | options))
        checks.append(check)

    def all_fail(task):
        def check(report):
            bare = {test.partition("[")[0] for test in task.tests}
            passes = {test for test in bare if not any(each.startswith(test) for each in failed(report))}
            assert not passes, f"{task.title}: without its functions {passes} pass all the same"

        return check

    def some_fail(task, function):
        def check(report):
            assert failed(report), f"{task.title}: no test misses {function.name}"

        return check

    def all_pass(task):
        def check(report):
            assert report.is_green, f"{task.title}: with the tasks up to it: {report.failures or report.stuck}"
            assert report.shown.strip(), f"{task.title}: what runs now shows nothing"
            assert "Traceback" not in report.shown, f"{task.title}: {report.shown}"

        return check

    for task, help in zip(tasks, hints_of(name), strict=True):
        add([task], task, all_fail(task))
        add(tasks[task.number :], task, all_pass(task), help.runs)
        if len(task.functions) > 1:
            for function in task.functions:
                alone = type(task)(name, task.number, task.title, task.minutes, (function,), task.tests)
                add([alone], task, some_fail(task, function), first=True, seconds=SOON)
    for check, report in zip(checks, run_jobs(name, jobs), strict=True):
        check(report)


@pytest.mark.parametrize("name", MILESTONES)
def test_every_fault_shows_its_symptom_and_is_seen_by_all_of_its_tests(
    run_jobs: Runner, tmp_path: Path, name: str
) -> None:
    milestone, _ = milestone_with_tasks(name)
    jobs = []
    for fault in faults_of(name):
        folder = tmp_path / str(fault.number)
        start.make_faulty(milestone, fault, folder / name)
        jobs.append(Job(str(folder), name, fault.tests, seconds=SECONDS))
        jobs.append(Job(str(folder), name, [], fault.help.runs))
    reports = iter(run_jobs(name, jobs))
    for fault in faults_of(name):
        seen, symptom = next(reports), next(reports)
        blind = [test for test in fault.tests if not any(each.startswith(test) for each in failed(seen))]
        assert not blind, f"{name}, fault {fault.number} is not seen by {blind}"
        assert symptom.shown.strip(), f"{name}, fault {fault.number} shows nothing"
