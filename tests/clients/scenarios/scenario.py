"""What the scenarios share. They are run by each client's own interpreter, so this needs the standard library only.

A scenario is a script with a few functions, each of them one thing that a user of the client does:

    @works("chat, whole and streamed")
    def chat(server): ...

    @refused("tools", saying="tools is not supported")
    def tools(server): ...  # raises what the client makes of the server's refusal

and ends with `main()`, which runs them in order and prints what came out as the last line, in JSON.
"""

import contextlib
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Server:
    """The server under test, and the answers that it gives to plain HTTP: greedy, of `max_tokens` tokens."""

    url: str
    model: str
    folder: str
    max_tokens: int
    question: str
    chat_text: str
    chat_usage: list[int]  # tokens of the prompt, and of the answer
    prompt: str
    completion_text: str
    completion_usage: list[int]

    @property
    def api(self) -> str:
        """What clients call the base URL."""
        return f"{self.url}/v1"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat whose answer is known."""
        return [{"role": "user", "content": self.question}]


Check = Callable[[Server], None]
_tries: list[tuple[dict[str, str], Check, str | None]] = []


def works(tried: str, setting: str | None = None) -> Callable[[Check], Check]:
    """A thing that has to work, by `setting` where the client's defaults do not do."""
    entry = {"tried": tried, "outcome": "works"} if setting is None else {"tried": tried, "with": setting}
    return _register({"outcome": "works with"} | entry, None)


def refused(tried: str, saying: str) -> Callable[[Check], Check]:
    """A thing that the server refuses, with a sentence that the client has to show."""
    return _register({"tried": tried, "outcome": "refused by design", "said": saying}, saying)


def _register(entry: dict[str, str], saying: str | None) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        _tries.append((entry, check, saying))
        return check

    return register


def outcome(entry: dict[str, str], check: Check, saying: str | None, server: Server) -> dict[str, str]:
    """`entry` if `check` ends as it should, else the same try with `fails` and why."""
    fault = None
    try:
        check(server)
    except (Exception, SystemExit) as error:
        told = f"{type(error).__name__}: {error}"
        if saying is None or saying not in told:
            traceback.print_exc()
            fault = " ".join(told.split())[:300]
        else:
            entry = entry | {"said": _sentence(error, told) or saying}
    else:
        if saying is not None:
            fault = "it was not refused"
    return entry if fault is None else {"tried": entry["tried"], "outcome": "fails", "said": fault}


def _sentence(error: BaseException | None, told: str) -> str | None:
    """The server's own sentence: most clients keep the answer's body, others print it."""
    while error is not None:
        body = getattr(error, "body", None)
        if isinstance(body, dict) and (message := body.get("error", body).get("message")):
            return str(message)
        error = error.__cause__ or error.__context__
    found = re.search(r"""['"]message['"]: *(['"])(?P<sentence>.+?)\1, *['"]type['"]""", told)
    found = found or re.search(r"Error code: \d+ - (?P<sentence>[^{\s].*)", told)
    return found["sentence"].strip() if found else None


def main() -> None:
    """Run every try of the script that calls this."""
    server = Server(**json.loads(sys.argv[1]))
    print(json.dumps([outcome(*each, server) for each in _tries]), flush=True)


def equal(found: Any, expected: Any, what: str) -> None:
    """An assertion that says what differs."""
    if found != expected:
        raise AssertionError(f"{what}: {found!r} is not {expected!r}")


def positive(value: Any, what: str) -> None:
    """A measured time has to be one."""
    if not (isinstance(value, int | float) and value > 0):
        raise AssertionError(f"{what} is {value!r}")


@contextlib.contextmanager
def raises(kind: type[BaseException], saying: str) -> Iterator[None]:
    """The block raises the client's own exception, with the server's words."""
    try:
        yield
    except kind as error:
        if saying not in str(error):
            raise AssertionError(f"{kind.__name__} without {saying!r}: {error}") from None
    else:
        raise AssertionError(f"no {kind.__name__}")


def program(name: str, *arguments: str, **options: Any) -> str:
    """What a program of the client's own environment prints.

    Raises:
        RuntimeError: it ended with another exit code than 0; with the end of what it said.
    """
    command = [str(Path(sys.executable).parent / name), *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)
    if done.returncode:
        # Programs draw boxes and break lines in them.
        said = " ".join(f"{done.stdout} {done.stderr}".split())
        raise RuntimeError(f"{name} ended with exit code {done.returncode}: {said[-3000:]}")
    return done.stdout
