"""A pytest plugin: the run says how much memory it took at its peak, and fails where that is too much for a laptop.

That is the most that was resident at once. With pytest-xdist the peaks of all workers and of the process that leads
them are added, as if they had come together. Processes that tests start are not in it.
"""

import ctypes
import re
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT = 4 * 10**9  # bytes
_of_workers: list[int] = []


def peak_bytes() -> int:
    """What this process has had resident at most, and its workers, where it has some."""
    if sys.platform == "linux":  # where `ru_maxrss` begins with what the parent had
        own = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return own + sum(_of_workers)


def give_back_memory() -> None:
    """Give what this process has freed back to the system: glibc keeps hundreds of megabytes of matrices otherwise.

    Other C libraries are left to themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended."""
    _of_workers.append(getattr(node, "workeroutput", {}).get("peak_bytes", 0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak_bytes"] = peak_bytes()
    elif peak_bytes() > LIMIT and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    peak = f"peak memory: {peak_bytes() / 1e9:.1f} GB"
    if peak_bytes() > LIMIT:
        terminalreporter.write_line(f"{peak}, above the limit of {LIMIT / 1e9:g} GB: the run has failed", red=True)
    else:
        terminalreporter.write_line(peak)
