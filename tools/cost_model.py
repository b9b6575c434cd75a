"""The playground's cost model: four figures, fitted to what v0.5 measured, and how far it is from v0.5's experiments.

    python -m tools.cost_model            writes docs/playground/cost_model.json
    python -m tools.cost_model --check    says whether that file is what the measurements give

A step takes so many milliseconds, and so many more for each request in it, for each token, and for each pair of a token
and one before it that it attends to. `attribution.json` has the time of four kinds of step, and within each the part of
attention. Attention is fitted to steps, requests and pairs, everything else to steps, requests and tokens, each by
least squares of the relative errors.

The experiments are other runs, on other days. Each is simulated with v0.5's own scheduler and block manager. What is
compared is the ratio of two ways of doing the same, because that is what a reader of the playground compares.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "playground"))

from simulator.cost import CostModel  # noqa: E402
from simulator.entry import sources_of, use_folder  # noqa: E402
from simulator.policy import Policy  # noqa: E402
from simulator.scenario import Script, Settings  # noqa: E402
from simulator.simulation import Simulation, run  # noqa: E402

MEASURED = ROOT / "v0_5_bench" / "measurements" / "attribution.json"
OUT = ROOT / "docs" / "playground" / "cost_model.json"
MILESTONE = "v0_5_bench"
BUDGET = 512  # v0.5's default
# What `attribute --only steps` did: prompts of 30, 5 steps before the clock, then 20 decode steps.
DECODES, PROMPT, STEPS_BEFORE, NUM_STEPS, PREFILL = (1, 8, 32), 30, 5, 20, 2000
TOLERANCE = 0.15


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; with `--check`, 1 where the file differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    text = json.dumps(make(json.loads(MEASURED.read_text())), indent=1) + "\n"
    if args.check:
        return 0 if OUT.is_file() and OUT.read_text() == text else 1
    OUT.write_text(text)
    return 0


def make(measured: dict[str, Any]) -> dict[str, Any]:
    """The file's content."""
    steps = measured["steps"]["steps"]
    parts = fit(steps)
    ms = {name: round(value, 6) for name, value in parts.items()}
    cost = CostModel(ms)
    return {
        "what": "ms of a step: per step, per request in it, per token, per pair of a token and one it attends to",
        "fitted_to": "v0_5_bench/measurements/attribution.json, steps",
        "ms": ms,
        "fit": {name: _compared(steps[name]["step_ms"]["median"], _milliseconds(cost, name)) for name in steps},
        "experiments": experiments(measured["experiments"], cost),
    }


def features(name: str) -> dict[str, float]:
    """Steps, requests, tokens and pairs of a measured kind: of one decode step, or of the whole prefill."""
    if name == "prefill_2000":
        num_chunks = -(-PREFILL // BUDGET)
        pairs = PREFILL * (PREFILL + 1) / 2
        return {"step": num_chunks, "request": num_chunks, "token": PREFILL, "pair": pairs}
    num = int(name)
    # The first step computes the prompt; each later one a token that sees itself and all before it.
    context = PROMPT + STEPS_BEFORE - 1 + (NUM_STEPS - 1) / 2 + 1
    return {"step": 1, "request": num, "token": num, "pair": num * context}


def fit(steps: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of each part, from the measured steps."""
    names = [*map(str, DECODES), "prefill_2000"]
    attention = {name: steps[name]["attention"]["median"] for name in names}
    others = {name: steps[name]["step_ms"]["median"] - attention[name] for name in names}
    total = dict.fromkeys(("step", "request", "token", "pair"), 0.0)
    for target, parts in ((attention, ("step", "request", "pair")), (others, ("step", "request", "token"))):
        rows = np.array([[features(name)[part] / target[name] for part in parts] for name in names])
        values, *_ = np.linalg.lstsq(rows, np.ones(len(names)), rcond=None)
        for part, value in zip(parts, values, strict=True):
            total[part] += float(value)
    return total


def _milliseconds(cost: CostModel, name: str) -> float:
    found = features(name)
    parts = {"step": cost.step, "request": cost.request, "token": cost.token, "pair": cost.pair}
    return 1e3 * sum(found[part] * value for part, value in parts.items())


def _compared(measured: float, simulated: float) -> dict[str, float]:
    error = simulated / measured - 1
    return {"measured": round(measured, 4), "simulated": round(simulated, 4), "error": round(error, 4)}


def experiments(measured: dict[str, Any], cost: CostModel) -> dict[str, Any]:
    """Each experiment's ways, measured and simulated; and their ratios to one of them, with the errors of those."""
    lens = [8 + 24 * (i % 5) for i in range(24)]
    simulated: dict[str, tuple[str, dict[str, float], str]] = {
        "batching": (
            "tokens_per_s",
            {
                "one at a time": _rate(cost, [(30, 32)] * 16, max_num_seqs=1),
                "together": _rate(cost, [(30, 32)] * 16, max_num_seqs=256),
            },
            "one at a time",
        ),
        "static_batching": (
            "tokens_per_s",
            {
                "static": sum(lens) / sum(_seconds(cost, [(30, n) for n in lens[i : i + 8]]) for i in range(0, 24, 8)),
                "continuous": _rate(cost, [(30, n) for n in lens], max_num_seqs=8),
            },
            "static",
        ),
        "chunked_prefill": (
            "longest_gap_ms",
            {
                "in chunks of 512": max(_gaps(cost, 3000, 512)),
                "in one step": max(_gaps(cost, 3000, 4096)),
            },
            "in chunks of 512",
        ),
        "token_budget": (
            "longest_gap_ms",
            {str(budget): max(_gaps(cost, 2000, budget)) for budget in (64, 128, 256, 512, 1024, 2048)},
            "512",
        ),
    }
    result = {}
    for name, (quantity, ways, base) in simulated.items():
        found = {way: measured[name]["ways"][way][quantity]["median"] for way in ways}
        ratios = {
            way: _compared(found[way] / found[base], value / ways[base]) for way, value in ways.items() if way != base
        }
        result[name] = {
            "what": measured[name]["what"],
            "quantity": quantity,
            "ways": {way: _compared(found[way], value) for way, value in ways.items()},
            "base": base,
            "ratios": ratios,
            "within": all(abs(ratio["error"]) <= TOLERANCE for ratio in ratios.values()),
        }
    smallest = measured["token_budget"]["ways"]["64"]["median_gap_ms"]["median"]
    result["token_budget"]["median_gap_ms_at_64"] = _compared(smallest, statistics.median(_gaps(cost, 2000, 64)))
    return result


@cache
def _policy() -> Policy:
    """v0.5's own, loaded once: each run makes its scheduler and its blocks from it."""
    use_folder(ROOT / "docs" / "playground", {MILESTONE: ROOT / MILESTONE})
    return Policy(MILESTONE, sources_of(MILESTONE))


def _scripts(lens: Sequence[tuple[int, int]]) -> list[Script]:
    return [
        Script(str(i), 0.0, list(range(10_000 * i, 10_000 * i + prompt)), 0, answer, [False] * answer)
        for i, (prompt, answer) in enumerate(lens)
    ]


def _seconds(cost: CostModel, lens: Sequence[tuple[int, int]], **settings: Any) -> float:
    chosen = Settings.of({"milestone": MILESTONE, "num_blocks": 1024, "max_num_seqs": 256} | settings)
    return run(_policy(), chosen, cost, _scripts(lens)).metrics["seconds"]


def _rate(cost: CostModel, lens: Sequence[tuple[int, int]], **settings: Any) -> float:
    return sum(answer for _, answer in lens) / _seconds(cost, lens, **settings)


def _gaps(cost: CostModel, length: int, budget: int) -> list[float]:
    """Milliseconds between two tokens of a stream, as the experiment has it.

    Eight requests write for eight steps; then the prompt comes. Until it has its first token, each step is a gap.
    """
    settings = {"milestone": MILESTONE, "num_blocks": 1024, "max_num_seqs": 256, "token_budget": budget}
    simulation = Simulation(_policy(), Settings.of(settings), cost)
    for script in _scripts([(30, 200)] * 8):
        simulation.add(script)
    for _ in range(8):
        simulation.step()
    long = Script("long", simulation.clock, list(range(1_000_000, 1_000_000 + length)), 0, 2, [False] * 2)
    simulation.add(long)
    gaps = []
    while not simulation.metrics.lives["long/0"].token_times:
        before = simulation.clock
        simulation.step()
        gaps.append((simulation.clock - before) * 1e3)
    return gaps


if __name__ == "__main__":
    sys.exit(main())
