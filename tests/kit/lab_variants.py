"""Run many versions of the milestones through their tests: one process imports what they need, each version forks it.

    python -m tests.kit.lab_variants

reads lines of JSON, `{"milestone": NAME, "jobs": [...]}`, and answers each with a line, the list of reports: those of
`tools.lab.trial`, as dictionaries. Importing torch and transformers takes seconds, a fork takes none.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.lab.listener import run_here
from tools.lab.trial import Job, Report
from tools.milestones import load_ledger

ROOT = Path(__file__).parents[2]
NEEDED = ("hypothesis.stateful", "httpx", "uvicorn", "fastapi", "transformers.models.llama.modeling_llama")
Runner = Callable[[str, Sequence[Job]], list[Report]]


@contextlib.contextmanager
def runner() -> Iterator[Runner]:
    """A function that runs a milestone's jobs."""
    command = [sys.executable, "-m", "tests.kit.lab_variants"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(milestone: str, jobs: Sequence[Job]) -> list[Report]:
            print(json.dumps({"milestone": milestone, "jobs": list(map(asdict, jobs))}), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, "the process has ended: what it says is above"
            return [Report.of(data) for data in json.loads(answer)]

        yield run
        process.stdin.close()


def main() -> None:
    """Answer until there is no line more."""
    prepare()
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(in_fork(lambda: run_all(order["milestone"], order["jobs"]))), flush=True)  # noqa: B023


def prepare() -> None:
    """Import what all tests will, but no milestone."""
    for name in NEEDED:
        importlib.import_module(name)
    for package in ("tests.kit", "tests.contracts"):
        for info in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            if not info.name.endswith("lab_variants"):
                importlib.import_module(info.name)
    import torch

    from tests.kit.checkpoints import tiny_llama

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama(Path(folder))  # once, for what transformers makes on the first occasion
    gc.collect()
    gc.freeze()  # what is here by now stays: no fork needs to look through it


def run_all(milestone: str, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports of one milestone's jobs; in a fork of its own, as the other milestones are imported first."""
    assert not any(name.partition(".")[0] == milestone for name in sys.modules), f"{milestone} is imported already"
    for other in load_ledger(ROOT)[1:]:
        if other.name != milestone:
            importlib.import_module(f"{other.name}.memory")
    return [report_of(Job(**job)) for job in jobs]


def report_of(job: Job) -> dict[str, Any]:
    """One job's report; of a test that does not end, which one it is."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        try:
            return in_fork(lambda: asdict(run_here(job, file)))
        except RuntimeError:
            running = file.with_suffix(".running")
            if not running.exists():
                raise
            return asdict(Report(stuck=(running.read_text(), None), said=file.with_suffix(".stuck").read_text()))


def in_fork(call: Callable[[], Any]) -> Any:
    """What a call returns, in a child; what it prints is shown if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder, "answer.json"), Path(folder, "output.txt")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with output.open("w") as out:
                    os.dup2(out.fileno(), 1)
                    os.dup2(out.fileno(), 2)
                answer.write_text(json.dumps(call()))
                status = 0
            finally:
                sys.stderr.flush()
                sys.stdout.flush()
                os._exit(status)
        _, code = os.waitpid(child, 0)
        if code != 0 or not answer.exists():
            raise RuntimeError(f"it has ended with {code}:\n{output.read_text(errors='replace')[-3000:]}")
        return json.loads(answer.read_text())


if __name__ == "__main__":
    main()
