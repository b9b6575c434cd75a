"""A conversation over HTTP, turn by turn: `python -m v0_6_prefix_cache.measurements.chat`.

Every turn of a chat sends the whole conversation again. One server finds what it has computed for the earlier turns,
prompts and answers; another, started with `--no-enable-prefix-caching`, computes it again. Both are processes and
answer the same conversation in turns, streamed, greedy, each answer of a fixed length (`min_tokens`: with `ignore_eos`
an answer could hold end tokens, which are no text, and come back as other tokens). The figures go to `chat.json` with
their recipe; the pages quote that file. About two minutes.
"""

import argparse
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.measuring.recipe import recipe, spread
from common.weights import resolve

RESULTS = Path(__file__).with_suffix(".json")
MILESTONE = (__package__ or "").partition(".")[0]
NUM_TURNS, ANSWER_LEN = 6, 64
WORDS_A_TURN = 120  # of the user
WORDS = (
    "boat", "river", "morning", "baker", "letter", "garden", "winter", "station", "music", "lantern", "bridge",
    "market", "teacher", "island", "window", "engine", "harbour", "forest", "ticket", "kitchen", "summer", "valley",
    "painter", "village", "pencil", "mountain", "doctor", "blanket", "library", "candle",
)  # fmt: skip
VERBS = ("crossed", "painted", "remembered", "found", "left", "followed", "visited", "lost")

Conversation = list[dict[str, str]]


def main() -> None:
    """Hold the conversations, print what was measured and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=NUM_TURNS)
    parser.add_argument("--repeats", type=int, default=3, help="conversations that count, after one that warms up")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    folder = resolve(None)
    turns: list[dict[str, list[dict[str, float]]]] = [{"caching_on": [], "caching_off": []} for _ in range(args.turns)]
    same = 0
    with ExitStack() as stack:
        servers = {
            way: stack.enter_context(_server(folder, flag))
            for way, flag in (
                ("caching_on", "--enable-prefix-caching"),
                ("caching_off", "--no-enable-prefix-caching"),
            )
        }
        bar = stack.enter_context(tqdm(total=(args.repeats + 1) * args.turns * 2, desc="Turns", unit="turn"))
        for repeat in range(args.repeats + 1):
            rng = random.Random(repeat)
            messages = [{"role": "system", "content": f"You are a friendly listener. This is conversation {repeat}."}]
            for turn in turns:
                messages.append({"role": "user", "content": _story(rng)})
                answers = {}
                for way in servers if repeat % 2 else reversed(servers):
                    figures, answers[way] = _ask(servers[way], messages)
                    bar.update()
                    if repeat:
                        turn[way].append(figures)
                same += answers["caching_on"] == answers["caching_off"] if repeat else 0
                messages.append({"role": "assistant", "content": answers["caching_on"]})
    results = {
        "recipe": recipe(
            model=folder.name.rpartition("-")[0],
            dtype="float32",
            turns=args.turns,
            words_a_turn=WORDS_A_TURN,
            answer_len=ANSWER_LEN,
            temperature=0,
            warmup_conversations=1,
            repeats=args.repeats,
        ),
        "what": "ms to the first text of each turn of a conversation that grows; the ratio is on by off",
        "turns": {str(number): _summary(turn) for number, turn in enumerate(turns, 1)},
        "same_answers": f"{same} of {args.turns * args.repeats}",
    }
    print(json.dumps(results, indent=1))
    args.out.write_text(json.dumps(results, indent=1) + "\n")


def _summary(turn: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    pairs = list(zip(turn["caching_on"], turn["caching_off"], strict=True))
    return {
        **{way: {key: spread([each[key] for each in found]) for key in found[0]} for way, found in turn.items()},
        "ttft_ratio": spread([on["ttft_ms"] / off["ttft_ms"] for on, off in pairs]),
    }


def _story(rng: random.Random) -> str:
    """What a user says in a turn: sentences that no other turn has."""
    sentences = []
    for _ in range(WORDS_A_TURN // 10):
        a, b, c = rng.sample(WORDS, 3)
        sentences.append(f"Near the {a} my {rng.choice(WORDS)} {rng.choice(VERBS)} the {b} before the {c}.")
    return " ".join([*sentences, "What happened next?"])


@contextmanager
def _server(folder: Path, flag: str) -> Iterator[int]:
    """The port of a server in a process of its own, until the block ends."""
    command = [sys.executable, "-m", f"{MILESTONE}.server", "--model", str(folder), "--port", "0", flag]
    # Into a file: a pipe that nobody reads would stop a server that has much to say.
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stderr=said) as process:
        try:
            while process.poll() is None:
                said.seek(0)
                if found := re.search(r"Listening on http://[^:]+:(\d+)", said.read()):
                    yield int(found[1])
                    return
                time.sleep(0.1)
            said.seek(0)
            raise RuntimeError(f"the server did not start: {said.read()}")
        finally:
            process.send_signal(signal.SIGTERM)


def _ask(port: int, messages: Conversation) -> tuple[dict[str, float], str]:
    """One turn: what was measured, and the answer's text."""
    body = {
        "messages": messages,
        "max_completion_tokens": ANSWER_LEN,
        "min_tokens": ANSWER_LEN,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    ttft = 0.0
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read().decode()}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                ttft = ttft or time.perf_counter() - start
                pieces.append(text)
    seconds = time.perf_counter() - start
    connection.close()
    if usage["completion_tokens"] != ANSWER_LEN:
        raise RuntimeError(f"{usage['completion_tokens']} tokens came, {ANSWER_LEN} were asked for")
    return {
        "ttft_ms": ttft * 1e3,
        "seconds": seconds,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }, "".join(pieces)


if __name__ == "__main__":
    main()
