"""What HTTP costs, and how this server stands beside vLLM's: `python -m v0_4_http.measurements.over_http`.

Ratios within one run, in turns; whichever server has no work is stopped, since an idle engine may keep a core busy. The
client is a process of its own, on the same two cores. `--vllm-venv` names an environment with the real vLLM, whose
server then answers the same requests. The figures go to `over_http.json` with their recipe; the pages quote that
file. Dropped in v0.5, whose harness does this and more.
"""

import argparse
import json
import os
import random
import selectors
import signal
import socket
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from common.measuring.child import Child
from common.measuring.recipe import recipe, spread
from common.weights import resolve

MILESTONE = (__package__ or "").partition(".")[0]
RESULTS = Path(__file__).with_suffix(".json")
NAME = "SmolLM2-135M-Instruct"
NUM_PROMPT_TOKENS, NUM_TOKENS = 30, 64

# `LLM.generate`, and the engine driven as a stream of one request, in a process of its own; answers a line with a line.
OFFLINE = """
import importlib, json, sys, time
package = importlib.import_module(sys.argv[1])
llm = package.LLM(sys.argv[2])
for line in sys.stdin:
    prompts, num_tokens = json.loads(line)
    params = package.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    if len(prompts) > 1:
        llm.generate(prompts, params, use_tqdm=False)
        first = None
    else:
        stream = llm.stream(prompts[0], params)
        next(stream)
        first = time.perf_counter() - start
        for _ in stream:
            pass
    print("RESULT " + json.dumps([time.perf_counter() - start, first]), flush=True)
"""


class Process(Child):
    """A process group that also runs while a `with` block lasts: a server is not asked, it serves."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        super().__init__(" ".join(Path(word).name for word in command[:3]), command, environment=environment)

    def __enter__(self) -> Self:
        self._signal(signal.SIGCONT)
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it: a server does not read its input, and is told by SIGTERM."""
        self._signal(signal.SIGCONT)
        self.process.terminate()
        super().close()


def main() -> None:
    """Run the measurements, print them and write them down; with `--client`, be the client of one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    parser.add_argument("--vllm-venv", type=Path, help="a virtual environment that has the real vLLM")
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        _be_client(args.client)
        return
    folder = resolve(None)
    results: dict[str, Any] = {
        "recipe": recipe(model=NAME, dtype="float32", repeats=args.repeats, prompt=NUM_PROMPT_TOKENS, output=NUM_TOKENS)
    }
    measurements: dict[str, Callable[[], Any]] = {"overhead": lambda: measure_overhead(folder, args.repeats)}
    if args.vllm_venv:
        measurements["vllm"] = lambda: measure_vllm(folder, args.vllm_venv, args.repeats)
    for name, measure in measurements.items():
        print(f"{name} ...", flush=True)
        results[name] = measure()
        print(json.dumps(results[name], indent=1), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.out}")


def measure_overhead(folder: Path, repeats: int) -> dict[str, Any]:
    """The same 32 requests through HTTP and through `LLM.generate`; and the time to the first token of one alone."""
    port = _free_port()
    server = _start_ours(folder, port)
    offline = Process([sys.executable, "-c", OFFLINE, MILESTONE, str(folder)])
    client = Process([sys.executable, "-m", f"{__package__}.over_http", "--client", str(port)])
    rates: dict[str, list[float]] = {"http": [], "generate": []}
    ttfts: dict[str, list[float]] = {"http": [], "stream": []}
    for repeat in range(repeats + 1):
        many, [one] = _prompts(32, repeat), _prompts(1, 1000 + repeat)
        with server, client:
            streams = client.ask([many, NUM_TOKENS])
            [alone] = client.ask([[one], NUM_TOKENS])
        with offline:
            seconds, _ = offline.ask([many, NUM_TOKENS])
            _, first = offline.ask([[one], NUM_TOKENS])
        if repeat:
            rates["http"].append(_rate(streams))
            rates["generate"].append(len(many) * NUM_TOKENS / seconds)
            ttfts["http"].append(alone["ttft"] * 1e3)
            ttfts["stream"].append(first * 1e3)
    for process in (server, offline, client):
        process.close()
    return {
        "what": "output tokens/s of 32 requests at once, and ms to the first token of one alone",
        "rate": {name: spread(values) for name, values in rates.items()},
        "rate_ratio": spread([a / b for a, b in zip(rates["http"], rates["generate"], strict=True)]),
        "ttft_ms": {name: spread(values) for name, values in ttfts.items()},
        "added_ttft_ms": spread([a - b for a, b in zip(ttfts["http"], ttfts["stream"], strict=True)]),
    }


def measure_vllm(folder: Path, venv: Path, repeats: int) -> dict[str, Any]:
    """Median TTFT and TPOT of 1 and of 16 streams at once: ours, vLLM's, and ours by vLLM's (below 1 is better)."""
    ports = {"ours": _free_port(), "vllm": _free_port()}
    servers = {"ours": _start_ours(folder, ports["ours"])}
    with servers["ours"]:
        pass  # stopped, until it is its turn
    servers["vllm"] = _start_vllm(folder, venv, ports["vllm"])
    clients = {
        name: Process([sys.executable, "-m", f"{__package__}.over_http", "--client", str(port)])
        for name, port in ports.items()
    }
    table: dict[str, Any] = {}
    for num in (1, 16):
        values: dict[str, dict[str, list[float]]] = {name: {"ttft": [], "tpot": [], "rate": []} for name in servers}
        for repeat in range(repeats + 1):
            prompts = _prompts(num, 100 * num + repeat)
            for name in servers if repeat % 2 else reversed(servers):
                with servers[name], clients[name]:
                    streams = clients[name].ask([prompts, NUM_TOKENS])
                if repeat:
                    values[name]["ttft"].append(statistics.median(s["ttft"] for s in streams) * 1e3)
                    values[name]["tpot"].append(statistics.median(s["tpot"] for s in streams) * 1e3)
                    values[name]["rate"].append(_rate(streams))
        table[str(num)] = {
            **{name: {kind: spread(list_) for kind, list_ in kinds.items()} for name, kinds in values.items()},
            "ratio": {
                kind: spread([a / b for a, b in zip(values["ours"][kind], values["vllm"][kind], strict=True)])
                for kind in ("ttft", "tpot", "rate")
            },
        }
    for process in (*servers.values(), *clients.values()):
        process.close()
    return {"what": "median ms of TTFT and TPOT over the streams, and output tokens/s", "streams": table}


def _start_ours(folder: Path, port: int) -> Process:
    flags = ["--model", str(folder), "--served-model-name", NAME, "--port", str(port), "--log-level", "warning"]
    return _started(Process([sys.executable, "-m", f"{MILESTONE}.server", *flags]), port)


def _start_vllm(folder: Path, venv: Path, port: int) -> Process:
    flags = ["--served-model-name", NAME, "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    flags += ["--max-model-len", "4096", "--no-enable-prefix-caching"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
    }
    return _started(Process([str(venv / "bin" / "vllm"), "serve", str(folder), *flags], environment), port)


def _started(process: Process, port: int) -> Process:
    """Wait until its server answers; vLLM's first start takes minutes."""
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return process
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        if process.process.poll() is not None:
            break
    raise RuntimeError(f"{' '.join(map(str, process.process.args))} does not serve: run it by hand to see why")  # type: ignore[arg-type]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _prompts(num: int, seed: int) -> list[list[int]]:
    """Random token ids, never the same twice: nothing may come from a cache."""
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(num)]


def _rate(streams: list[dict[str, float]]) -> float:
    """Output tokens/s from the first request to the last answer's end."""
    return sum(s["num_tokens"] for s in streams) / (max(s["end"] for s in streams) - min(s["start"] for s in streams))


def _be_client(port: int) -> None:
    """Answer each line of standard input, prompts and a number of tokens, with what the streams were like."""
    for line in sys.stdin:
        print("RESULT " + json.dumps(_stream_all(port, *json.loads(line))), flush=True)


def _stream_all(port: int, prompts: list[list[int]], num_tokens: int) -> list[dict[str, float]]:
    """All prompts at once, each as a streamed completion on a connection of its own.

    As little client as possible, since it takes its time from the server's cores: it notes when which bytes came, and
    reads them when all have come.
    """
    selector = selectors.DefaultSelector()
    starts, received = [], []
    for number, prompt in enumerate(prompts):
        starts.append(time.perf_counter())
        received.append([(starts[-1], b"")])
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(_request(port, prompt, num_tokens))
        selector.register(connection, selectors.EVENT_READ, number)
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(65536)
            received[key.data].append((time.perf_counter(), data))
            if not data or data.endswith(b"0\r\n\r\n"):  # the end of a chunked body
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return [_summary(start, pieces, num_tokens) for start, pieces in zip(starts, received, strict=True)]


def _request(port: int, prompt: list[int], num_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()


def _summary(start: float, pieces: list[tuple[float, bytes]], num_tokens: int) -> dict[str, float]:
    """Times of one stream. By token, not by chunk: a chunk may hold several tokens, or half a character none."""
    times, num_generated, text = [], 0, b""
    for now, piece in pieces:
        text += piece
        *lines, text = text.split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                chunk = json.loads(line.removeprefix(b"data: "))
                if chunk.get("usage"):
                    num_generated = chunk["usage"]["completion_tokens"]
                elif chunk["choices"] and chunk["choices"][0]["text"]:
                    times.append(now)
    if num_generated != num_tokens:
        raise RuntimeError(f"{num_generated} tokens came, {num_tokens} were asked for")
    return {
        "start": start,
        "end": pieces[-1][0],
        "ttft": times[0] - start,
        "tpot": (times[-1] - times[0]) / (num_tokens - 1),
        "num_tokens": num_tokens,
    }


if __name__ == "__main__":
    main()
