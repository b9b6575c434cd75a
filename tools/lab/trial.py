"""Run a milestone's own tests against a lab, in a process of its own, and note what they say.

The lab's folder comes first in the search for modules, so that `v0_2_block_manager` is the learner's: for the tests,
for their fixtures, and for the processes that they start. No test is copied or changed.

    python -m tools.lab.trial REPORT < JOB        both are JSON
"""

import contextlib
import faulthandler
import importlib
import io
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tools.lab.tasks import ROOT

SECONDS = 60  # for one test: a loop that does not end is a learner's usual fault
STUCK_AT = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Job:
    """What to run: `folder` holds the package of that name, `runs` is Python for afterwards, if all tests pass.

    `verbose` has pytest say all it can, `first` has it stop at the first failure.
    """

    folder: str
    package: str
    tests: Sequence[str]
    runs: str = ""
    verbose: bool = False
    first: bool = False
    seconds: int = SECONDS


@dataclass(slots=True)
class Failure:
    """What one test that fails has said.

    `kind` is the error's type, `compared` the two sides of the assertion that failed (`(operator, left, right)`),
    `statement` the test's line, `place` the last line of the lab that was running (`(file, line, function, text)`).
    """

    test: str
    arguments: dict[str, str]
    kind: str
    message: str
    compared: tuple[str, str, str] | None = None
    statement: str = ""
    test_place: tuple[str, int] | None = None
    place: tuple[str, int, str, str] | None = None


@dataclass(slots=True)
class Report:
    """What came of a job. `said` is what pytest has printed, `shown` what `runs` has; `stuck` is the test that did not
    end, with the lab's line where it was."""

    passed: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    stuck: tuple[str, tuple[str, int, str] | None] | None = None
    shown: str = ""
    said: str = ""

    @property
    def is_green(self) -> bool:
        """Whether all tests ran and passed."""
        return bool(self.passed) and not self.failures and self.stuck is None


def run(job: Job) -> Report:
    """Start a process for a job, and wait for it; Ctrl-C ends both."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        done = subprocess.run(
            [sys.executable, "-m", "tools.lab.trial", str(file)],
            input=json.dumps(asdict(job)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        report = _loaded(file) if file.exists() else Report()
        report.said = done.stdout
        running = file.with_suffix(".running")
        if running.exists():  # it did not come to the end of this test
            dump = file.with_suffix(".stuck").read_text()
            report.stuck = running.read_text(), _place_in(dump, job.folder)
    return report


def run_here(job: Job, file: Path | None = None) -> Report:
    """Run a job in this process, which must not have imported the package, and is of no use for another job."""
    sys.path.insert(0, job.folder)
    sys.dont_write_bytecode = True  # two versions within a second would be taken for one
    # For the processes that tests start: not the folder that they run in, but the lab comes first.
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([job.folder, str(ROOT)]),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # none is needed here, and to load them takes a second
    }
    importlib.invalidate_caches()
    report = Report()
    if not job.tests:
        report.shown = _shown(job.runs)
        return report
    pytest.register_assert_rewrite("tests.contracts", "tests.kit")
    options = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-o", "pythonpath=", "--color=no", "-q", "--all"]
    options.append("--tb=auto" if job.verbose else "--tb=native")  # the latter is quick
    options += ["-x"] if job.first else []
    status = pytest.main(
        ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), *options, *job.tests],
        plugins=[_Listener(job, report, file)],
    )
    if status == pytest.ExitCode.USAGE_ERROR and not report.failures:
        report.failures.append(Failure("", {}, "UsageError", "pytest could not find these tests"))
    if report.is_green and job.runs:
        report.shown = _shown(job.runs)
    return report


class _Listener:
    """A pytest plugin that writes a report."""

    def __init__(self, job: Job, report: Report, file: Path | None) -> None:
        self.job, self.report, self.file = job, report, file
        self.compared: tuple[str, str, str] | None = None

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        self.compared = op, _short(left), _short(right)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.compared = None
        if self.file is None:
            return (yield)
        running = self.file.with_suffix(".running")
        running.write_text(item.nodeid)
        with self.file.with_suffix(".stuck").open("w") as dump:
            faulthandler.dump_traceback_later(self.job.seconds, exit=True, file=dump)
            result = yield
            faulthandler.cancel_dump_traceback_later()
        running.unlink()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        result = yield
        if result.skipped:
            self.report.skipped.append(item.nodeid)
        elif result.passed and result.when == "call":
            self.report.passed.append(item.nodeid)
        elif result.failed and call.excinfo is not None:
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            arguments = {name: _short(value) for name, value in parameters.items()}
            self.report.failures.append(self._failure(item.nodeid, arguments, call.excinfo))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        result = yield
        if result.failed:
            error = getattr(result, "longrepr", "")
            place = _last_place(str(error), self.job.folder)
            lines = [line for line in str(error).split("\n") if line.startswith("E ")]
            message = (lines or [str(error)])[-1].removeprefix("E").strip()
            self.report.failures.append(Failure(collector.nodeid, {}, "ImportError", message, place=place))
        return result

    def _failure(self, test: str, arguments: dict[str, str], error: pytest.ExceptionInfo[BaseException]) -> Failure:
        failure = Failure(test, arguments, error.typename, str(error.value))
        for entry in error.traceback:
            path, line = str(entry.path), entry.lineno + 1
            if path.startswith(self.job.folder + os.sep):
                failure.place = path, line, entry.name, linecache.getline(path, line).strip()
            elif path.startswith(str(ROOT / "tests")):
                failure.statement, failure.test_place = str(entry.statement).strip(), (path, line)
        if isinstance(error.value, AssertionError) and str(error.value).lstrip().startswith("assert "):
            failure.compared = self.compared
        return failure


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:300]} ... {text[-80:]}"


def _place_in(dump: str, folder: str) -> tuple[str, int, str] | None:
    """The innermost line of the lab in what faulthandler has written."""
    for match in STUCK_AT.finditer(dump):
        if match["file"].startswith(folder + os.sep):
            return match["file"], int(match["line"]), match["name"]
    return None


def _last_place(error: str, folder: str) -> tuple[str, int, str, str] | None:
    """The last line of the lab in pytest's account of an error at import, which names files from its root."""
    pattern = re.compile(r"^(?P<file>\S+\.py):(?P<line>\d+): ", re.MULTILINE)
    paths = [(str((ROOT / match["file"]).resolve()), int(match["line"])) for match in pattern.finditer(error)]
    mine = [(path, line) for path, line in paths if path.startswith(folder + os.sep)]
    return (*mine[-1], "", "") if mine else None


def _shown(code: str) -> str:
    """What a piece of Python prints; an error is part of it."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(code, "<what runs now>", "exec"), {"__name__": "__lab__"})
        except Exception:
            out.write(traceback.format_exc(limit=-1))
    return out.getvalue()


def _loaded(file: Path) -> Report:
    data = json.loads(file.read_text(encoding="utf-8"))
    failures = [Failure(**failure) for failure in data.pop("failures")]
    return Report(failures=failures, **data)


def main() -> None:
    """Read a job, run it, write its report."""
    file = Path(sys.argv[1])
    report = run_here(Job(**json.load(sys.stdin)), file)
    file.write_text(json.dumps(asdict(report)), encoding="utf-8")


if __name__ == "__main__":
    main()
