"""What HTTP costs now that steps are short: `python -m v0_9_fast.measurements.over_http`.

The same 32 requests through the server and through `LLM.generate`, in turns; whichever has no work is stopped. The
client is a process of its own, on the same cores, so its processor time is measured too, and the server's. The figures
go to `over_http.json` with their recipe; the pages quote that file. It takes about two minutes.
"""

import argparse
import json
import random
import selectors
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from common.measuring.child import Child
from common.measuring.recipe import recipe, spread
from common.weights import resolve

MILESTONE = (__package__ or "").partition(".")[0]
RESULTS = Path(__file__).with_suffix(".json")
NAME = "SmolLM2-135M-Instruct"
NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_TOKENS = 32, 30, 64

# `LLM.generate` in a process of its own; answers a line with a line.
OFFLINE = """
import importlib, json, sys, time
package = importlib.import_module(sys.argv[1])
llm = package.LLM(sys.argv[2], enable_prefix_caching=False)
for line in sys.stdin:
    prompts, num_tokens = json.loads(line)
    params = package.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    print("RESULT " + json.dumps(time.perf_counter() - start), flush=True)
"""


class Server(Child):
    """A server, which runs only while a `with` block lasts."""

    def __enter__(self) -> Self:
        self._signal(signal.SIGCONT)
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGSTOP)

    def cpu_seconds(self) -> float:
        """The processor time that it has taken since it began."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100  # user and system, in hundredths of a second

    def loop_seconds(self) -> float:
        """The event loop's part of it: it runs in the first thread."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9

    def close(self) -> None:
        """End it by SIGTERM: it does not read its input."""
        self._signal(signal.SIGCONT)
        self.process.terminate()
        super().close()


def main() -> None:
    """Measure, print and write it down; with `--client`, be the client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count, after one that warms up")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        for line in sys.stdin:
            print("RESULT " + json.dumps(_stream_all(args.client, *json.loads(line))), flush=True)
        return
    load = {"requests": NUM_REQUESTS, "prompt": NUM_PROMPT_TOKENS, "output": NUM_TOKENS}
    made = recipe(model=NAME, dtype="float32", repeats=args.repeats, warmup_rounds=1, **load)
    results = {"recipe": made, **measure(resolve(None), args.repeats)}
    print(json.dumps(results, indent=1))
    args.out.write_text(json.dumps(results, indent=1) + "\n")


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    """Output tokens/s both ways, and the processor seconds of server and client for a second of serving."""
    port = _free_port()
    server = _started(folder, port)
    offline = Child("LLM.generate", [sys.executable, "-c", OFFLINE, MILESTONE, str(folder)])
    client = Child("client", [sys.executable, "-m", f"{__package__}.over_http", "--client", str(port)])
    rates: dict[str, list[float]] = {"http": [], "generate": []}
    cpu: dict[str, list[float]] = {"server": [], "event_loop": [], "client": []}
    num_tokens = NUM_REQUESTS * NUM_TOKENS
    try:
        for repeat in range(repeats + 1):
            print(f"round {repeat} of {repeats} ...", file=sys.stderr, flush=True)
            question = [_prompts(repeat), NUM_TOKENS]
            with server:
                before, loop_before = server.cpu_seconds(), server.loop_seconds()
                seconds, its_cpu = client.ask(question)
                used, used_by_loop = server.cpu_seconds() - before, server.loop_seconds() - loop_before
            offline_seconds = offline.ask(question)
            if repeat:
                rates["http"].append(num_tokens / seconds)
                rates["generate"].append(num_tokens / offline_seconds)
                cpu["server"].append(used / seconds)
                cpu["event_loop"].append(used_by_loop / seconds)
                cpu["client"].append(its_cpu / seconds)
    finally:
        for process in (server, offline, client):
            process.close()
    return {
        "what": f"output tokens/s of {NUM_REQUESTS} requests at once; processor seconds in a second of serving",
        "rate": {name: spread(values) for name, values in rates.items()},
        "share": spread([a / b for a, b in zip(rates["http"], rates["generate"], strict=True)]),
        "cpu": {name: spread(values) for name, values in cpu.items()},
    }


def _started(folder: Path, port: int) -> Server:
    flags = ["--model", str(folder), "--served-model-name", NAME, "--port", str(port), "--log-level", "warning"]
    server = Server("server", [sys.executable, "-m", MILESTONE, "--no-enable-prefix-caching", *flags])
    for _ in range(120):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return server
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        if server.process.poll() is not None:
            break
    raise SystemExit("The server does not serve: run `python -m v0_9_fast` by hand to see why.")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _prompts(seed: int) -> list[list[int]]:
    """Random token ids, never the same twice."""
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(NUM_REQUESTS)]


def _stream_all(port: int, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
    """All prompts at once, each streamed on a connection of its own: seconds until the end, and of processor time.

    As little client as possible, since it takes its time from the server's cores: the bytes are looked at only when
    all have come.
    """
    selector = selectors.DefaultSelector()
    received = [b""] * len(prompts)
    cpu, start = time.process_time(), time.perf_counter()
    for number, prompt in enumerate(prompts):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(_request(port, prompt, num_tokens))
        selector.register(connection, selectors.EVENT_READ, number)
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(65536)
            received[key.data] += data
            if not data or data.endswith(b"0\r\n\r\n"):  # the end of a chunked body
                selector.unregister(key.fileobj)
                key.fileobj.close()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    for stream in received:
        if f'"completion_tokens":{num_tokens}'.encode() not in stream:
            raise RuntimeError(f"a stream has not its {num_tokens} tokens: {stream[-300:]!r}")
    return seconds, cpu


def _request(port: int, prompt: list[int], num_tokens: int) -> bytes:
    options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"model": NAME, "prompt": prompt, "max_tokens": num_tokens, **options})
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()


if __name__ == "__main__":
    main()
