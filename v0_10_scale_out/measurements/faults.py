"""What a killed replica costs under load: `python -m v0_10_scale_out.measurements.faults`.

Two replicas of one thread each answer 16 users, each of whom asks again as soon as its answer is complete. After some
seconds one replica gets SIGKILL. Every request's end is noted, and every token's moment.

The figures go to `faults.json` with their recipe. A round takes about two minutes on two cores.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.measuring.recipe import recipe, spread

from .load import NAME, Answer, Question, Server, ask, random_prompts

RESULTS = Path(__file__).with_suffix(".json")
NUM_USERS, NUM_PROMPT_TOKENS, NUM_TOKENS = 16, 30, 32
WINDOW = 5.0  # seconds over which a rate is taken
FULL = 0.9  # of the rate before the kill


def main() -> None:
    """Measure, print and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="rounds, each with fresh servers")
    parser.add_argument("--before", type=float, default=20.0, help="seconds of load before the kill")
    parser.add_argument("--after", type=float, default=50.0, help="seconds of load after it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    load = {"users": NUM_USERS, "prompt": NUM_PROMPT_TOKENS, "output": NUM_TOKENS}
    made = recipe(model=NAME, dtype="float32", repeats=args.repeats, before=args.before, after=args.after, **load)
    rounds = []
    for repeat in range(args.repeats):
        print(f"round {repeat + 1} of {args.repeats} ...", file=sys.stderr, flush=True)
        with Server(1, 2) as server:
            rounds.append(asyncio.run(kill_one(server, repeat, args.before, args.after)))
    what = "requests; output tokens/s before the kill; seconds from it to two replicas, and to the full rate"
    spreads = {name: spread([float(one[name]) for one in rounds]) for name in rounds[0] if name != "errors"}
    results = {
        "recipe": made,
        "what": what,
        **spreads,
        "errors": sorted({error for one in rounds for error in one["errors"]}),
    }
    print(json.dumps(results, indent=1))
    args.out.write_text(json.dumps(results, indent=1) + "\n")


async def kill_one(server: Server, seed: int, before: float, after: float) -> dict[str, Any]:
    """One round under load."""
    answers: list[Answer] = []
    start = time.perf_counter()

    async def ask_again_and_again(user: int) -> None:
        rng = random.Random(1000 * seed + user)
        while time.perf_counter() < start + before + after:
            [prompt] = random_prompts(rng.randrange(2**40), 1, NUM_PROMPT_TOKENS)
            answers.append(await ask(server.port, Question(prompt, NUM_TOKENS)))

    users = [asyncio.create_task(ask_again_and_again(user)) for user in range(NUM_USERS)]
    await asyncio.sleep(before)
    names = await asyncio.to_thread(_replicas, server)
    os.kill(next(iter(names.values())), signal.SIGKILL)
    killed = time.perf_counter()
    replaced = await asyncio.to_thread(_seconds_until_two, server, names, killed, after)
    await asyncio.gather(*users)
    moments = sorted(moment for answer in answers for moment in answer.times)
    rate = _rate(moments, killed - before / 2, killed)
    lost = [answer.error for answer in answers if answer.error is not None]
    return {
        "asked": len(answers),
        "lost": len(lost),
        "rate": rate,
        "replaced": replaced,
        "full": _seconds_until_full(moments, killed, FULL * rate, after),
        "errors": lost,
    }


def _replicas(server: Server) -> dict[str, int]:
    """The replicas' names and processes; none where they cannot be asked."""
    with contextlib.suppress(OSError):
        return {replica["name"]: replica["pid"] for replica in json.loads(server.get("/replicas"))["replicas"]}
    return {}


def _seconds_until_two(server: Server, before: dict[str, int], killed: float, most: float) -> float:
    """Until two replicas answer, one of which is new."""
    while time.perf_counter() < killed + most:
        now = _replicas(server)
        if len(now) == 2 and now != before:
            return time.perf_counter() - killed
        time.sleep(0.2)
    raise SystemExit(f"No replica has come within {most:g} seconds.")


def _rate(moments: Sequence[float], start: float, end: float) -> float:
    return sum(start <= moment < end for moment in moments) / (end - start)


def _seconds_until_full(moments: Sequence[float], killed: float, rate: float, most: float) -> float:
    """Until the first window after the kill in which the rate is full again; the window counts, too."""
    for tenth in range(round((most - WINDOW) * 10)):
        if _rate(moments, killed + tenth / 10, killed + tenth / 10 + WINDOW) >= rate:
            return tenth / 10 + WINDOW
    raise SystemExit(f"The rate is not full again within {most:g} seconds.")


if __name__ == "__main__":
    main()
