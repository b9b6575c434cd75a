"""What routing by prefix brings on two replicas: `python -m v0_10_scale_out.measurements.routing`.

Two replicas of one thread each, whose pools hold half of what the loads have in common (`workloads.py`). In each round
the same sessions are asked with each routing, each time of fresh replicas. What a step costs here is measured, too: the
simulation (`simulation.py`) takes it from this file, and says how far off it is.

The figures go to `routing.json` with their recipe. A round takes about four minutes on two cores.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.measuring.recipe import recipe, spread

from ..cluster.routing import ROUTINGS
from .load import NAME, Answer, Question, Server, ask, ask_all, figures, random_prompts
from .workloads import NUM_BLOCKS, NUM_USERS, WORKLOADS, Session

RESULTS = Path(__file__).with_suffix(".json")
NUM_REPLICAS = 2


def main() -> None:
    """Measure, print and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="rounds, each with other prompts and fresh servers")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    made = recipe(model=NAME, dtype="float32", repeats=args.repeats, num_blocks=NUM_BLOCKS, replicas=NUM_REPLICAS)
    results = {"recipe": made, **measure(args.repeats)}
    print(json.dumps(results, indent=1))
    args.out.write_text(json.dumps(results, indent=1) + "\n")


def measure(repeats: int) -> dict[str, Any]:
    """Of each load and each routing: share of cached tokens, median TTFT and rate; and what a step costs."""
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {load: {name: [] for name in ROUTINGS} for load in WORKLOADS}
    costs = []
    for repeat in range(repeats):
        for routing in ROUTINGS:
            print(f"round {repeat + 1} of {repeats}: {routing} ...", file=sys.stderr, flush=True)
            with Server(1, NUM_REPLICAS, routing=routing, num_blocks=NUM_BLOCKS) as server:
                for load, sessions in WORKLOADS.items():
                    answers = asyncio.run(ask_sessions(server.port, sessions(repeat, NUM_USERS)))
                    rounds[load][routing].append(summary(answers))
                if routing == "balanced":  # it alone gives each of them the same number of requests
                    costs.append(measure_costs(server.port, repeat))
    return {
        "what": "share of the prompts' tokens that were cached, median TTFT in ms, output tokens/s; costs in ms",
        "loads": {load: _compared(of_load) for load, of_load in rounds.items()},
        "costs": {name: spread([cost[name] for cost in costs]) for name in costs[0]},
    }


async def ask_sessions(port: int, sessions: Sequence[Session]) -> list[tuple[int, Answer]]:
    """All users at once, each of them turn by turn: the length of each prompt, and its answer."""

    async def one(session: Session) -> list[tuple[int, Answer]]:
        said: list[int] = []
        answers = []
        for turn in session:
            prompt = turn.prompt(said)
            answer = await ask(port, Question(prompt, turn.num_tokens))
            if answer.error is not None:
                raise SystemExit(f"A request failed: {answer.error}")
            said = prompt + answer.token_ids
            answers.append((len(prompt), answer))
        return answers

    return [answer for answers in await asyncio.gather(*map(one, sessions)) for answer in answers]


def summary(answers: Sequence[tuple[int, Answer]]) -> dict[str, float]:
    """Of one load."""
    of_all = figures([answer for _, answer in answers])
    num_cached = sum(answer.num_cached_tokens for _, answer in answers)
    cached = num_cached / sum(length for length, _ in answers)
    return {"cached": cached, "ttft_ms": of_all["ttft_ms"], "rate": of_all["rate"]}


def measure_costs(port: int, seed: int) -> dict[str, float]:
    """Milliseconds of a step, of a request in it, of a token of a prompt, and of everything around the engine.

    Both replicas are busy, as they are under load: they share the machine's memory.
    """

    def decode(number: int) -> dict[str, float]:
        prompts = random_prompts(-1 - 1000 * seed - number, NUM_REPLICAS * number, 16)
        return figures(asyncio.run(ask_all(port, [Question(prompt, 64) for prompt in prompts])))

    one, eight = decode(1), decode(8)
    request = max(0.0, (eight["tpot_ms"] - one["tpot_ms"]) / 7)
    prompts = random_prompts(-2 - 1000 * seed, NUM_REPLICAS, 1000)
    answers = asyncio.run(ask_all(port, [Question(prompt, 1) for prompt in prompts]))
    long_ms = statistics.median(answer.ttft for answer in answers) * 1e3
    # A prompt of 16 tokens takes a step, and one of 1,000 takes two.
    token = max(0.0, (long_ms - one["ttft_ms"] - one["tpot_ms"]) / (1000 - 16))
    around = max(0.0, one["ttft_ms"] - one["tpot_ms"] - 15 * token)
    return {"step": one["tpot_ms"] - request, "request": request, "token": token, "around": around}


def _compared(of_load: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """By routing; and the TTFT's ratio to that of random routing, round by round."""
    by_routing: dict[str, Any] = {
        routing: {name: spread([one[name] for one in rounds]) for name in rounds[0]}
        for routing, rounds in of_load.items()
    }
    for routing, rounds in of_load.items():
        pairs = zip(rounds, of_load["random"], strict=True)
        by_routing[routing]["ttft_of_random"] = spread([one["ttft_ms"] / other["ttft_ms"] for one, other in pairs])
    return by_routing


if __name__ == "__main__":
    main()
