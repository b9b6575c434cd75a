"""A process that answers JSON with JSON, and stands still while it is asked nothing: how engines are compared.

It reads a line of JSON from standard input and writes a line `RESULT {json}` to standard output; whatever else it
prints there is passed over. Between two questions all of its processes are stopped: an idle engine may keep a core
busy, and would slow down whoever is measured next. Torch-free. Changes in no milestone.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from common.errors import ModelError

SECONDS_TO_END = 30
LAST_LINES = 8  # of what a process said on standard error before it ended


class Child:
    """One such process, and all that it starts.

    Args:
        name: what it is called in errors.
        command: its command line.
        environment: added to our own.
        cwd: where it runs; a relative import of a Python process begins there.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=os.environ | (environment or {}),
                cwd=cwd,
                start_new_session=True,  # a group of its own, so that all of it can be stopped
            )
        except OSError as error:
            self._stderr.close()
            raise ModelError(f"{name} cannot be started: {command[0]}: {error.strerror}.") from None
        # Read by a thread: a process that has ended is noticed though the pipe's other end is still open somewhere.
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, question: Any) -> Any:
        """Let it run until it has answered.

        Raises:
            ModelError: it has ended; the message has the last lines that it wrote to standard error.
        """
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended, and so does its output
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        while (line := self._next_line()) is not None:
            if line.startswith("RESULT "):
                self._signal(signal.SIGSTOP)
                return json.loads(line.removeprefix("RESULT "))
        code = self.process.wait()
        raise ModelError(f"{self.name} has ended with exit code {code}:\n{self.said()}")

    def _next_line(self) -> str | None:
        """The next line of its output; `None` once it has ended. What it has started may live on and hold the pipe."""
        while True:
            try:
                return self._lines.get(timeout=0.5)
            except queue.Empty:
                if self.process.poll() is not None:
                    return None

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under our eyes
            for line in self.process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def said(self) -> str:
        """The last lines that it wrote to standard error."""
        self._stderr.seek(0)
        return "\n".join(self._stderr.read().strip().splitlines()[-LAST_LINES:])

    def close(self) -> None:
        """End it: it reads the end of its input, and has half a minute to go; what it has started is killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=SECONDS_TO_END)
        self._signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)
