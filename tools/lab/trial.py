"""Run a milestone's own tests against a lab, in a process of its own, and note what they say.

The lab's folder comes first in the search for modules, so that `v0_2_block_manager` is the learner's: for the tests,
for their fixtures, and for the processes that they start. No test is copied or changed.

What happens in that process is in `listener.py`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.lab.tasks import ROOT, LabError

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

    `kind` is the error's type, `compared` the two sides of the assertion that failed (`(operator, left, right)`).
    `statement` is the test's line. `place` is the last line of the lab that was running, (file, line, function, text),
    and `way` the lab's functions that led there.
    """

    test: str
    arguments: dict[str, str]
    kind: str
    message: str
    compared: tuple[str, str, str] | None = None
    statement: str = ""
    test_place: tuple[str, int] | None = None
    place: tuple[str, int, str, str] | None = None
    way: list[str] = field(default_factory=list)


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

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Report":
        """From what `asdict` has made of one, by way of JSON."""
        return cls(**data | {"failures": [Failure(**failure) for failure in data["failures"]]})

    @property
    def is_green(self) -> bool:
        """Whether all tests ran and passed."""
        return bool(self.passed) and not self.failures and self.stuck is None


def lab_first(folder: str) -> dict[str, str]:
    """Environment in which Python finds modules in a lab's folder first, and never in the one that it runs in."""
    return {"PYTHONPATH": os.pathsep.join([folder, str(ROOT)]), "PYTHONSAFEPATH": "1"}


def run(job: Job) -> Report:
    """Start a process for a job, and wait for it; Ctrl-C ends both.

    Raises:
        LabError: pytest is not installed.
    """
    if importlib.util.find_spec("pytest") is None:
        raise LabError("The lab runs the milestones' tests, with pytest. Install it: pip install -e '.[test]'")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        done = subprocess.run(
            [sys.executable, "-m", "tools.lab.listener", str(file)],
            input=json.dumps(asdict(job)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        report = Report.of(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else Report()
        report.said = done.stdout
        running = file.with_suffix(".running")
        if running.exists():  # it did not come to the end of this test
            dump = file.with_suffix(".stuck").read_text()
            report.stuck = running.read_text(), _place_in(dump, job.folder)
    return report


def _place_in(dump: str, folder: str) -> tuple[str, int, str] | None:
    """The innermost line of the lab in what faulthandler has written."""
    for match in STUCK_AT.finditer(dump):
        if match["file"].startswith(folder + os.sep):
            return match["file"], int(match["line"]), match["name"]
    return None
