"""What the largest bodies of every shape do to everybody else: `python -m v0_4_http.measurements.large_bodies`.

While a server writes one stream and is asked for `/health` fifty times a second, it is sent body after body, each as
large as it takes, or as large as its context lets it. For each shape: the answer, how long it took, the longest and the
99th percentile of `/health`, and the longest gap in the stream. The client shares the machine; its own pauses are
measured in the same way before the first body, and given beside the others. Figures go to `large_bodies.json`.
"""

import argparse
import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.measuring.recipe import recipe
from common.tokenizer import Tokenizer
from common.weights import resolve

from ..server.bodies import default_limit
from .over_http import NAME, _free_port, _start_ours

RESULTS = Path(__file__).with_suffix(".json")
JSON = {"Content-Type": "application/json"}
CONTEXT = 8192
SECONDS_BETWEEN = 0.02


def shapes(limit: int, num_characters: int) -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body of each; `num_characters` are the most that are not refused by their number.

    All of them are refused in the end, or ask for one token: what is honestly asked for may take its time.
    """

    def filled(before: bytes, unit: bytes, after: bytes) -> bytes:
        return before + unit * ((limit - len(before) - len(after)) // len(unit) - 1) + unit.rstrip(b",") + after

    def text(words: str) -> str:
        return (words * num_characters)[:num_characters]

    def body(**fields: Any) -> bytes:
        return json.dumps({"max_tokens": 1} | fields).encode()

    completions, chat = "/v1/completions", "/v1/chat/completions"
    for name, words in (("words", "hello "), ("spaces", " "), ("letters and digits", "ab1"), ("one letter", "a")):
        yield f"text: {name}, to the limit", completions, filled(b'{"prompt":"', words.encode(), b'"}')
        yield f"text: {name}, encoded", completions, body(prompt=text(words))
        yield f"/tokenize: {name}, encoded", "/tokenize", json.dumps({"prompt": text(words)}).encode()
    message = {"role": "user", "content": ""}
    yield (
        "chat: empty messages, to the limit",
        chat,
        filled(b'{"messages":[', json.dumps(message).encode() + b",", b"]}"),
    )
    yield "chat: empty messages, rendered", chat, body(messages=[message] * CONTEXT)
    yield "chat: one long message", chat, body(messages=[message | {"content": text("hello ")}])
    parts = [{"type": "text", "text": ""}] * 40_000
    yield "chat: parts of a message", chat, body(messages=[{"role": "user", "content": parts}])
    yield "ids, to the limit", completions, filled(b'{"prompt":[', b"1,", b"]}")
    yield "ids, one more than the context", completions, body(prompt=[1] * (CONTEXT + 1))
    yield "prompts of one id, to the limit", completions, filled(b'{"prompt":[', b"[1],", b"]}")
    yield "prompts: 1,024 texts", completions, body(prompt=["hello " * (limit // 1024 // 7)] * 1024, max_tokens=8000)
    yield "prompts: 1,024 lists of 480 ids", completions, body(prompt=[[1] * 480] * 1024, max_tokens=8000)
    yield "/detokenize: ids, to the limit", "/detokenize", filled(b'{"tokens":[', b"1,", b"]}")
    yield "/detokenize: a context", "/detokenize", json.dumps({"tokens": [20] * CONTEXT}).encode()
    yield "lists, to the limit", completions, filled(b'{"prompt":"Hi","x":[', b"[],", b"]}")
    yield "lists, as many as are read", completions, b'{"prompt":"Hi","x":[%s[]]}' % (b"[]," * 49_000)
    yield "numbers, to the limit", completions, filled(b'{"prompt":"Hi","max_tokens":1,"x":[', b"1.5,", b"]}")
    yield "strings, to the limit", completions, filled(b'{"prompt":"Hi","max_tokens":1,"x":[', b'"",', b"]}")
    fields = ",".join(f'"f{number}":1' for number in range(limit // 12))
    yield (
        "unknown fields",
        completions,
        b'{"prompt":"Hi","max_tokens":1,%s}' % fields.encode()[: limit - 100].rpartition(b",")[0],
    )
    yield "logit_bias: every id", completions, body(prompt="Hi", logit_bias={str(i): 0.5 for i in range(49_152)})
    wrong = ",".join(f'"{number}":"x"' for number in range(limit // 13)).encode()
    yield (
        "logit_bias: wrong values",
        completions,
        b'{"prompt":"Hi","logit_bias":{%s}}' % wrong[: limit - 100].rpartition(b",")[0],
    )


class Observed:
    """`/health` and one stream, asked and read in threads until the end of the block."""

    def __init__(self, port: int) -> None:
        self.port, self.health, self.chunks = port, [(0.0, 0.0)], [0.0]  # (when, seconds); when
        self._ended = False
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._ask, self._read)]

    def __enter__(self) -> "Observed":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join(60)

    def between(self, start: float, end: float) -> dict[str, float]:
        """What was seen in that time: ms."""
        health = sorted(seconds for when, seconds in self.health if when + seconds >= start and when <= end)
        times = [start, *(when for when in self.chunks if start < when < end), end]
        return {
            "health_p99_ms": round(health[int(0.99 * (len(health) - 1) + 0.5)] * 1e3, 1) if health else 0.0,
            "health_max_ms": round(health[-1] * 1e3, 1) if health else 0.0,
            "stream_gap_ms": round(max(b - a for a, b in itertools.pairwise(times)) * 1e3, 1),
        }

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        while not self._ended:
            start = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.health.append((start, time.perf_counter() - start))
            time.sleep(SECONDS_BETWEEN)

    def _read(self) -> None:
        body = {"prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        while not self._ended:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            connection.request("POST", "/v1/completions", json.dumps(body), JSON)
            response = connection.getresponse()
            while not self._ended and response.readline():
                self.chunks.append(time.perf_counter())
            connection.close()


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    folder = resolve(None)
    tokenizer = Tokenizer.from_folder(folder)
    limit = default_limit(tokenizer, CONTEXT)
    assert tokenizer.length_bound is not None
    cases = list(shapes(limit, CONTEXT * tokenizer.length_bound.longest))
    port = _free_port()
    results: dict[str, Any] = {"recipe": recipe(model=NAME, dtype="float32", body_limit=limit), "shapes": {}}
    with _start_ours(folder, port) as server, Observed(port) as observed:
        time.sleep(2)
        start = time.perf_counter()
        time.sleep(2)
        results["nothing"] = observed.between(start, time.perf_counter())
        print(f"{'nothing':40} {results['nothing']}", flush=True)
        for name, path, body in cases:
            start = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            try:
                connection.request("POST", path, body, JSON)
                response = connection.getresponse()
                status = response.status
                response.read()
            except (BrokenPipeError, ConnectionResetError):
                status = 413
            connection.close()
            end = time.perf_counter()
            time.sleep(0.3)
            seen = observed.between(start, time.perf_counter())
            row = {"status": status, "bytes": len(body), "seconds": round(end - start, 2), **seen}
            results["shapes"][name] = row
            print(f"{name:40} {row}", flush=True)
    server.close()
    rows = results["shapes"].values()
    results["worst"] = {
        kind: max(row[kind] for row in rows) for kind in ("health_p99_ms", "health_max_ms", "stream_gap_ms")
    }
    print(results["worst"])
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
