"""Watch the engine at work: `python -m tools.visualize` starts the server, and sends it questions.

The pool is small, so that blocks are shared, evicted and taken away again. The questions end by themselves; the server
stays until Ctrl-C.
"""

import argparse
import json
import random
import signal
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.cli import read_lines, run
from common.units import check_count
from tools.demo_server import running
from tools.milestones import newest_page

ROOT = Path(__file__).parent.parent
QUESTIONS = ROOT / "v0_3_scheduler" / "measurements" / "questions.txt"
SYSTEM = (
    "You are a patient teacher. Answer in two or three plain sentences, and give an example that a child would know."
)


def main(argv: list[str] | None = None) -> int:
    """Serve and ask as `argv` says; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.visualize", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="of the server (default: 8000)")
    parser.add_argument("--num-blocks", type=int, default=48, help="of the pool (default: 48)")
    parser.add_argument("--num-requests", type=int, default=60, help="questions, about one a second (default: 60)")
    parser.add_argument("--model", help="what the server's --model takes (default: the default model)")
    args = parser.parse_args(argv)
    return run(lambda: _visualize(args))


def _visualize(args: argparse.Namespace) -> None:
    check_count("num_requests", args.num_requests)
    page = newest_page(ROOT)
    assert page is not None, "a milestone has the page"
    flags = ["--port", str(args.port), "--allow-control", "--log-level", "warning"]
    flags += ["--num-blocks", str(args.num_blocks), "--speculative-method", "ngram"]
    flags += ["--model", args.model] if args.model else []
    questions = read_lines(str(QUESTIONS))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server must not be left behind
    with running(page.parent.name, flags) as address, ThreadPoolExecutor(16) as clients:
        print(f"\n  Watch it: {address}/visualizer   (Ctrl-C ends)\n", file=sys.stderr)
        try:
            rng = random.Random(0)
            for _ in range(args.num_requests):
                clients.submit(_ask, address, _body(rng, questions))
                time.sleep(rng.expovariate(1.0))
            print("All questions are asked. The page can send more; Ctrl-C ends.", file=sys.stderr)
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            clients.shutdown(wait=False, cancel_futures=True)


def _body(rng: random.Random, questions: list[str]) -> dict[str, Any]:
    """A chat: half of them share a system prompt, some want two answers."""
    messages = [{"role": "system", "content": SYSTEM}] if rng.random() < 0.5 else []
    messages.append({"role": "user", "content": rng.choice(questions)})
    return {
        "messages": messages,
        "max_tokens": rng.randrange(20, 120),
        "n": rng.choice([1, 1, 1, 2]),
        "temperature": 0.7,
    }


def _ask(address: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        response.read()


if __name__ == "__main__":
    sys.exit(main())
