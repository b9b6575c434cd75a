"""What the measurements of this milestone share: servers, a client that streams, and the figures of a load.

The client runs on the server's cores, so it does little: it notes when each event comes, and reads the rest afterwards.
"""

import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

MILESTONE = (__package__ or "").partition(".")[0]
NAME = "SmolLM2-135M-Instruct"
SECONDS = 180  # for a server's start, and for its end


class Server:
    """A server in processes of its own, for as long as a `with` block lasts.

    Args:
        threads: that each replica computes with.
        replicas: how many, on Ray; `None` is one without Ray.
        ha_proxy: whether HAProxy stands in front, instead of Ray's own proxy.
        flags: more of the command line's, by their names in Python.
    """

    def __init__(self, threads: int, replicas: int | None = None, *, ha_proxy: bool = False, **flags: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        flags |= {"port": self.port, "served_model_name": NAME, "log_level": "warning", "max_queued_requests": 10_000}
        if replicas is not None:
            flags |= {"ray_address": "local", "replicas": replicas, "replica_cpus": threads}
        words = [_flag(name.replace("_", "-"), value) for name, value in flags.items()]
        self._command = [sys.executable, "-m", MILESTONE, *words]
        # Ray gives each replica as many threads as it has cores; this is for a server without it.
        self._environment = {"OMP_NUM_THREADS": str(threads)} if replicas is None else {}
        if ha_proxy:
            self._environment["RAY_SERVE_ENABLE_HA_PROXY"] = "1"

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, env=os.environ | self._environment
        )
        deadline = time.monotonic() + SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise SystemExit(f"The server does not serve:\n{self._log.read()[-3000:]}")
            time.sleep(0.5)
        asyncio.run(ask_all(self.port, [Question(prompt, 4) for prompt in random_prompts(-1, 8, 40)]))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(SECONDS)
        self._log.close()

    def get(self, path: str) -> str:
        """The body of an answer."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
            return str(response.read().decode())

    def _is_healthy(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True


def _flag(name: str, value: Any) -> str:
    return f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, as token ids, and how many tokens to say."""

    prompt: Sequence[int]
    num_tokens: int


@dataclass(slots=True)
class Answer:
    """What came, and when: `times` has one entry for each token, and `error` says why there are no more."""

    sent: float
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def random_prompts(seed: int, number: int, num_tokens: int) -> list[list[int]]:
    """Random token ids: no two prompts have a block in common."""
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(num_tokens)] for _ in range(number)]


async def ask_all(port: int, questions: Sequence[Question]) -> list[Answer]:
    """All of them at once."""
    answers = await asyncio.gather(*(ask(port, question) for question in questions))
    if errors := [answer.error for answer in answers if answer.error is not None]:
        raise SystemExit(f"{len(errors)} of {len(answers)} requests failed: {errors[0]}")
    return answers


async def ask(port: int, question: Question) -> Answer:
    """One of them, greedy, to its whole length; an error is in the answer."""
    options = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"prompt": question.prompt, "max_tokens": question.num_tokens} | options | stream)
    answer = Answer(time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        )
        events = await _read(reader)
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        answer.error = type(error).__name__
        return answer
    for moment, data in events:
        _note(answer, moment, data)
    if answer.error is None and len(answer.times) != question.num_tokens:
        answer.error = f"{len(answer.times)} tokens instead of {question.num_tokens}"
    return answer


async def _read(reader: asyncio.StreamReader) -> list[tuple[float, bytes]]:
    """The data of each event, and when it came. The body is chunked; an error's is one event."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" not in head:
        return [(time.perf_counter(), await reader.read())]
    events, rest = [], b""
    while size := int(await reader.readline(), 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        moment, [*whole, rest] = time.perf_counter(), rest.split(b"\n\n")
        events += [(moment, event.removeprefix(b"data: ")) for event in whole if not event.startswith(b":")]
    return events


def _note(answer: Answer, moment: float, data: bytes) -> None:
    if data == b"[DONE]":
        return
    said = json.loads(data)
    if "error" in said:
        answer.error = said["error"]["message"]
        return
    for choice in said["choices"]:
        answer.token_ids += choice["token_ids"]
        answer.times += [moment] * len(choice["token_ids"])
    if said.get("usage"):
        answer.num_cached_tokens = said["usage"]["prompt_tokens_details"]["cached_tokens"]


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Output tokens a second from the first question to the last token, and medians of TTFT and TPOT in ms."""
    start, end = min(answer.sent for answer in answers), max(answer.times[-1] for answer in answers)
    return {
        "rate": sum(len(answer.times) for answer in answers) / (end - start),
        "ttft_ms": statistics.median(answer.ttft for answer in answers) * 1e3,
        "tpot_ms": statistics.median(answer.tpot for answer in answers) * 1e3,
    }
