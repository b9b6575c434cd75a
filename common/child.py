"""A process that answers JSON with JSON, and stands still while it is asked nothing: how engines are compared.

It reads a line of JSON from standard input and writes a line `RESULT {json}` to standard output; whatever else it
prints there is passed over. Between two questions all of its processes are stopped: an idle engine may keep a core
busy, and would slow down whoever is measured next. Torch-free. Changes in no milestone.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from common.errors import ModelError

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
            raise ModelError(f"{name} cannot be started: {command[0]}: {error.strerror}.") from None

    def ask(self, question: Any) -> Any:
        """Let it run until it has answered.

        Raises:
            ModelError: it has ended; the message has the last lines that it wrote to standard error.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended, and so does its output
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                self._signal(signal.SIGSTOP)
                return json.loads(line.removeprefix("RESULT "))
        code = self.process.wait()
        raise ModelError(f"{self.name} has ended with exit code {code}:\n{self.said()}")

    def said(self) -> str:
        """The last lines that it wrote to standard error."""
        self._stderr.seek(0)
        return "\n".join(self._stderr.read().strip().splitlines()[-LAST_LINES:])

    def close(self) -> None:
        """End it: it reads the end of its input, and is killed if it does not go within half a minute."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)
