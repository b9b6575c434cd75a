"""In the process of a trial: pytest, and a plugin of it that notes what the tests say.

python -m tools.lab.listener REPORT < JOB        both are JSON
"""

import contextlib
import faulthandler
import importlib
import io
import json
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from _pytest._code import TracebackEntry
from hypothesis import Phase, settings

from tools.lab.tasks import ROOT
from tools.lab.trial import Failure, Job, Report, lab_first


def run_here(job: Job, file: Path | None = None) -> Report:
    """Run a job in this process, which must not have imported the package, and is of no use for another job."""
    sys.path.insert(0, job.folder)
    sys.dont_write_bytecode = True  # two versions within a second would be taken for one
    os.environ |= lab_first(job.folder) | {  # for the processes that tests start
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # none is needed here, and to load them takes a second
    }
    importlib.invalidate_caches()
    report = Report()
    if not job.tests:
        report.shown = _shown(job.runs)
        return report
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

    def pytest_configure(self) -> None:
        # What is imported later than this says its values when an assertion fails, as tests do.
        pytest.register_assert_rewrite("tests.contracts", "tests.kit")
        # A property test that fails would look for the smallest example, for a minute and more: the first will do.
        settings.register_profile(
            "lab", parent=settings.get_profile("repository"), phases=[Phase.explicit, Phase.generate]
        )
        settings.load_profile("lab")

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
        # Where something fails and a later task was to clear up after it, the first error is the one to tell.
        while isinstance(error.value, NotImplementedError) and error.value.__context__ is not None:
            error = pytest.ExceptionInfo.from_exception(error.value.__context__)
        failure = Failure(test, arguments, error.typename, str(error.value))
        for entry in error.traceback:
            path, line = str(entry.path), entry.lineno + 1
            if path.startswith(self.job.folder + os.sep):
                failure.place = path, line, entry.name, linecache.getline(path, line).strip()
                failure.way.append(f"{entry.name} ({Path(path).name}, line {line})")
            elif path.startswith(str(ROOT / "tests")):
                failure.statement, failure.test_place = _statement(path, line, entry), (path, line)
        if isinstance(error.value, AssertionError) and str(error.value).lstrip().startswith("assert "):
            failure.compared = self.compared
        return failure


def _statement(path: str, line: int, entry: TracebackEntry) -> str:
    """A line of a test; within `with pytest.raises(...)` that comes first, as it says what was expected."""
    text = str(entry.statement).strip()
    above = linecache.getline(path, line - 1)
    return f"{above.strip()}\n    {text}" if above.lstrip().startswith("with pytest.raises(") else text


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:300]} ... {text[-80:]}"


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


def main() -> None:
    """Read a job, run it, write its report."""
    file = Path(sys.argv[1])
    report = run_here(Job(**json.load(sys.stdin)), file)
    file.write_text(json.dumps(asdict(report)), encoding="utf-8")


if __name__ == "__main__":
    main()
