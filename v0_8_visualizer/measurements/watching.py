"""What it costs to be watched, and not to be: `python -m v0_8_visualizer.measurements.watching`.

    nobody     with nobody listening: how often a step asks the bus, and how long that takes, as a share of the step
    viewer     seconds of the same requests with a viewer at the server and with none, in turns

The first is arithmetic on two measured figures, since a part in a thousand can't be seen in a step's own time, which
varies by several per cent. The second runs the server's own `Viewers` with its event loop in this process. The figures
go to `watching.json` with their recipe; the pages quote that file. It takes about three minutes.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import loading
from common.measuring.recipe import recipe, spread
from common.outputs import RequestOutput
from common.sampling_params import SamplingParams
from common.weights import resolve

from ..async_engine import AsyncEngine
from ..engine import LLMEngine
from ..events import BlockFreed, Event, EventBus
from ..server.viewers import Viewers

RESULTS = Path(__file__).with_suffix(".json")
LOADS = {"1": (1, 30, 64), "8": (8, 30, 64), "32": (32, 30, 64)}  # requests, tokens of each prompt and answer
NUM_CALLS = 1_000_000
SEED = 0


class CountingBus(EventBus):
    """A bus with nobody listening that counts how often it is asked."""

    num_calls = 0

    def emit(self, event: type[Event], *args: Any) -> None:
        """Count."""
        self.num_calls += 1


class NoObserver:
    """Is told everything, and does nothing."""

    def on_output(self, output: RequestOutput, seconds: float, is_first: bool) -> None:
        """Observer."""

    def on_abort(self, request_id: str, num_choices: int, reason: str) -> None:
        """Observer."""


def main() -> None:
    """Run both, print what they measured and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count, after one that warms up")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    folder = resolve(None)
    made = recipe(
        model=folder.name.rpartition("-")[0],
        dtype="float32",
        threads=torch.get_num_threads(),
        seed=SEED,
        warmup_rounds=1,
        repeats=args.repeats,
    )
    model, tokenizer = loading.load(folder, None, device="cpu", dtype="float32")
    engine = LLMEngine(model, tokenizer=tokenizer, enable_prefix_caching=False)
    nobody = measure_nobody(engine, args.repeats)
    viewer = asyncio.run(measure_viewer(engine, args.repeats))
    results = {"recipe": made, "nobody": nobody, "viewer": viewer}
    print(json.dumps({"nobody": nobody, "viewer": viewer}, indent=1))
    args.out.write_text(json.dumps(results, indent=1) + "\n")


def measure_nobody(engine: LLMEngine, repeats: int) -> dict[str, Any]:
    """Calls of `emit` in a step, nanoseconds of each, and both as a share of the step's time."""
    nanoseconds = [_nanoseconds_of_a_call() for _ in range(repeats)]
    found: dict[str, Any] = {"nanoseconds_a_call": spread(nanoseconds)}
    for name, load in LOADS.items():
        calls, steps = [], []
        for repeat in tqdm(range(repeats + 1), desc=f"Nobody listens, {name} requests"):
            bus = CountingBus()
            _use(engine, bus)
            seconds, num_steps = _run(engine, load, repeat)
            if repeat:
                calls.append(bus.num_calls / num_steps)
                steps.append(seconds / num_steps)
        _use(engine, EventBus())
        share = [100 * c * statistics.median(nanoseconds) * 1e-9 / s for c, s in zip(calls, steps, strict=True)]
        found[name] = {
            "calls_a_step": spread(calls),
            "step_ms": spread([s * 1e3 for s in steps]),
            "share_percent": spread(share),
        }
    return found


async def measure_viewer(engine: LLMEngine, repeats: int) -> dict[str, Any]:
    """Seconds of each load through the server's engine thread, with one viewer and without, round by round."""
    driven = AsyncEngine(engine, max_queued_requests=64, observer=NoObserver())
    driven.start()
    found: dict[str, Any] = {}
    for name, load in LOADS.items():
        seconds: dict[str, list[float]] = {"alone": [], "watched": []}
        events = []
        for repeat in tqdm(range(repeats + 1), desc=f"A viewer, {name} requests"):
            for way in seconds if repeat % 2 else reversed(seconds):
                hub = Viewers(driven, {}, {}, most_recorded=200_000)
                watching = asyncio.create_task(_watch(hub)) if way == "watched" else None
                await asyncio.sleep(0.05)
                start = time.perf_counter()
                stream = driven.submit(f"{name}-{repeat}-{way}", _prompts(load, repeat), _params(load))
                async for _ in stream:
                    pass
                if repeat:
                    seconds[way].append(time.perf_counter() - start)
                if watching is not None:
                    await asyncio.sleep(0.05)
                    watching.cancel()
                    events.append(len(hub.recording()) / load[2])
                    _use(engine, EventBus())
        ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
        found[name] = {
            **{way: spread(values) for way, values in seconds.items()},
            "watched_to_alone": spread(ratios),
            "events_a_step": spread(events[1:]),
        }
    await driven.shutdown(0)
    return found


async def _watch(hub: Viewers) -> None:
    async for _ in hub.watch():
        pass


def _use(engine: LLMEngine, bus: EventBus) -> None:
    """Give the engine another bus."""
    engine.events = engine.scheduler.events = engine.scheduler.block_manager.events = bus


def _run(engine: LLMEngine, load: tuple[int, int, int], round_: int) -> tuple[float, int]:
    """Seconds and steps of a load."""
    num_before, start = engine.num_steps, time.perf_counter()
    for index, (_, prompt) in enumerate(_prompts(load, round_)):
        engine.add_request(str(index), None, _params(load), prompt_token_ids=prompt)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start, engine.num_steps - num_before


def _prompts(load: tuple[int, int, int], round_: int) -> list[tuple[str | None, list[int]]]:
    rng = random.Random(f"{SEED} {load} {round_}")
    return [(None, [rng.randrange(1000, 40_000) for _ in range(load[1])]) for _ in range(load[0])]


def _params(load: tuple[int, int, int]) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=load[2], ignore_eos=True)


def _nanoseconds_of_a_call() -> float:
    """Of `emit` with nobody listening, the loop around it included."""
    bus = EventBus()
    start = time.perf_counter()
    for _ in range(NUM_CALLS):
        bus.emit(BlockFreed, 1, "A/0", 0)
    return (time.perf_counter() - start) / NUM_CALLS * 1e9


if __name__ == "__main__":
    main()
