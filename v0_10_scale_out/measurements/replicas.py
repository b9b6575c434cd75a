"""What a second replica brings, and what Ray costs: `python -m v0_10_scale_out.measurements.replicas`.

The same requests, 1, 16 and 32 at once, to nine servers, which are started one after the other in each round:

    1 replica, 1 thread       without Ray, and the same with 2 threads: the server of v0.9
    2 replicas, 1 thread      on Ray, one thread each
    Ray, 1 thread             1 replica behind Ray's proxy and our ingress: they have a core of their own
    Ray, 2 threads            the same, where they have to share the engine's
    HAProxy, ...              the same behind HAProxy instead of Ray's proxy
    own streams, 1 thread     as with Ray, but each answer in a stream of its own (`cluster/joint.py`)

The figures go to `replicas.json` with their recipe. A round takes about four minutes on two cores.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from common.measuring.recipe import recipe, spread

from .load import NAME, Question, Server, ask_all, figures, random_prompts

RESULTS = Path(__file__).with_suffix(".json")
NUM_STREAMS = (1, 16, 32)
NUM_PROMPT_TOKENS, NUM_TOKENS = 30, 64
SERVERS: dict[str, dict[str, Any]] = {
    "1 replica, 1 thread": {"threads": 1},
    "1 replica, 2 threads": {"threads": 2},
    "2 replicas, 1 thread": {"threads": 1, "replicas": 2},
    "2 replicas, HAProxy": {"threads": 1, "replicas": 2, "ha_proxy": True},
    "Ray, 1 thread": {"threads": 1, "replicas": 1},
    "Ray, 2 threads": {"threads": 2, "replicas": 1},
    "HAProxy, 1 thread": {"threads": 1, "replicas": 1, "ha_proxy": True},
    "HAProxy, 2 threads": {"threads": 2, "replicas": 1, "ha_proxy": True},
    "own streams, 1 thread": {"threads": 1, "replicas": 1, "joint_answers": False},
}
ONE, TWO = "1 replica, 1 thread", "1 replica, 2 threads"
AGAINST = {  # which servers each one is compared with
    "1 replica, 2 threads": (ONE,),
    "2 replicas, 1 thread": (ONE, TWO),
    "2 replicas, HAProxy": (ONE, TWO),
    "Ray, 1 thread": (ONE,),
    "HAProxy, 1 thread": (ONE,),
    "Ray, 2 threads": (TWO,),
    "HAProxy, 2 threads": (TWO,),
    "own streams, 1 thread": (ONE,),
}


def main() -> None:
    """Measure, print and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="rounds, each with fresh servers")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    load = {"prompt": NUM_PROMPT_TOKENS, "output": NUM_TOKENS}
    made = recipe(model=NAME, dtype="float32", repeats=args.repeats, **load)
    results = {"recipe": made, **measure(args.repeats)}
    print(json.dumps(results, indent=1))
    args.out.write_text(json.dumps(results, indent=1) + "\n")


def measure(repeats: int) -> dict[str, Any]:
    """Of each server and each number of streams: rate, TTFT and TPOT, and the ratios to another server."""
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in SERVERS}
    for repeat in range(repeats):
        for name, server in SERVERS.items():
            print(f"round {repeat + 1} of {repeats}: {name} ...", file=sys.stderr, flush=True)
            with Server(**server) as running:
                rounds[name].append({f"{number}": _load(running.port, number, repeat) for number in NUM_STREAMS})
    return {
        "what": "output tokens/s, and medians of TTFT and TPOT in ms, by server and number of streams",
        "servers": {name: _spreads(of_rounds) for name, of_rounds in rounds.items()},
        "ratios": {
            f"{name} against {other}": _spreads(
                [_ratios(a, b) for a, b in zip(rounds[name], rounds[other], strict=True)]
            )
            for name, others in AGAINST.items()
            for other in others
        },
    }


def _load(port: int, number: int, seed: int) -> dict[str, float]:
    prompts = random_prompts(1000 * seed + number, number, NUM_PROMPT_TOKENS)
    return figures(asyncio.run(ask_all(port, [Question(prompt, NUM_TOKENS) for prompt in prompts])))


def _ratios(a: dict[str, dict[str, float]], b: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {streams: {name: value / b[streams][name] for name, value in of.items()} for streams, of in a.items()}


def _spreads(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        streams: {name: spread([of[streams][name] for of in rounds]) for name in rounds[0][streams]}
        for streams in rounds[0]
    }


if __name__ == "__main__":
    main()
