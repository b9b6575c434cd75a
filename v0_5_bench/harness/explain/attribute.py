"""`python -m v0_5_bench attribute`: where the time of this milestone goes, by measurement.

    steps            the parts of a step by the profiler, and whether they add up to a step without it
    http             the same parts while 32 streams are served over HTTP, and while `LLM.generate` serves them
    experiments      one decision at a time, with it and without it (`experiments.py`)
    prefix_caching   prompts that begin alike, in the first milestone with a prefix cache (v0.6), with it and without it
    operators        what PyTorch and the kernels compute in a step, in this engine and in vLLM (with --vllm-venv)
    machine          how many bytes and operations a second this machine can do: the roofline of the report

The parts of a step come with three figures that say whether they can be believed: `sum_of_step`, all named parts
against the step without the profiler (1 is all of it); `overhead`, a step with it against one without; and the spread.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.measuring.recipe import recipe, spread
from common.units import check_count

from .. import PROFILER
from ..compare import peers
from ..compare.compare import RATES, WORKLOADS, find_places
from ..load import online, runs
from ..load.workloads import random_ids, random_prompts
from ..report import tables

RESULTS = ("steps", "http", "experiments", "prefix_caching", "operators", "machine")
DECODES, NUM_STEPS, MAX_TOKENS = (1, 8, 32), 20, 200
HTTP_STREAMS, HTTP_PROMPT, HTTP_OUTPUT = 32, 30, 64
OPERATOR_DECODES, OPERATOR_PREFILL = (1, 8, 32), 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `attribute`."""
    parser.add_argument("--only", nargs="+", choices=RESULTS, help="parts of it; the others stay as the file has them")
    parser.add_argument("--experiments", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="what --model of the engine takes (default: the default model)")
    parser.add_argument("--vllm-venv", type=Path, help="a virtual environment with the real vLLM, for its operators")
    parser.add_argument("--operators-of", default="v0_5", metavar="ENGINE", help="v0_3 or later (default: v0_5)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")


def run(args: argparse.Namespace) -> None:
    """Measure, print, write the file."""
    from .experiments import Experiments

    check_count("repeats", args.repeats)
    runs.make_room(args.out)
    runs.need_aiohttp()
    names = args.experiments or Experiments.NAMES
    if unknown := set(names) - set(Experiments.NAMES):
        wrong = ", ".join(sorted(unknown))
        raise ModelError(f"There is no experiment {wrong}: choose from {', '.join(Experiments.NAMES)}.")
    places = find_places(args.model, args.vllm_venv, None)
    if args.vllm_venv is not None:
        peers.describe("vllm", places)  # what is missing is said before anything is measured
    peers.describe(args.operators_of, places)
    folder = places.folder
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.only and args.out.exists() else {}
    made = recipe(
        model=runs.model_name(folder),
        dtype="float32",
        threads=peers.NUM_THREADS,
        repeats=args.repeats,
    )
    measurements: dict[str, Callable[[], dict[str, Any]]] = {
        "steps": lambda: measure_steps(folder, args.repeats),
        "http": lambda: measure_http(folder, args.repeats),
        "experiments": lambda: measure_experiments(folder, args.repeats, names),
        "prefix_caching": lambda: measure_prefix_caching(folder, args.repeats),
        "operators": lambda: measure_operators(places, args.repeats, args.operators_of),
        "machine": lambda: measure_machine(folder, args.repeats),
    }
    for name in args.only or measurements:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = {"recipe": made, **measurements[name]()}
        print(_shown(name, results))
        runs.write(args.out, results)


def _shown(name: str, results: dict[str, Any]) -> str:
    """Its table as the report has it; where there is none, or not from this alone, the figures as they are."""
    try:
        return tables.render(name, {"attribution": results})
    except ModelError:
        return json.dumps({key: value for key, value in results[name].items() if key != "recipe"}, indent=1)


def measure_steps(folder: Path, repeats: int) -> dict[str, Any]:
    """Milliseconds of each part: of a decode step by requests, and of the whole prefill of 2,000 tokens."""
    from ...engine import LLMEngine
    from .experiments import params_of
    from .profiler import Profiler

    engine = LLMEngine(folder)

    def decode(num: int) -> Callable[[], object]:
        def steps() -> None:
            for _ in range(NUM_STEPS):
                engine.step()

        for number, prompt in enumerate(random_ids(num, 30)):
            engine.add_request(str(number), prompt, params_of(MAX_TOKENS))
        for _ in range(5):
            engine.step()
        return steps

    def prefill(length: int) -> Callable[[], object]:
        def steps() -> None:
            while engine.has_unfinished_requests():
                engine.step()

        engine.add_request("0", random_ids(1, length)[0], params_of(1))
        return steps

    def seconds_of(steps: Callable[[], object]) -> float:
        start = time.perf_counter()
        steps()
        return time.perf_counter() - start

    def finish(num: int) -> None:
        for number in range(num):
            engine.abort_request(str(number))

    table = {}
    for name, prepare, num, divisor in (
        *((str(num), decode, num, NUM_STEPS) for num in DECODES),
        ("prefill_2000", prefill, 2000, 1),
    ):
        samples: list[dict[str, float]] = []
        for repeat in range(repeats + 1):
            profiler, seconds = Profiler(engine), {}
            for is_profiled in (False, True) if repeat % 2 else (True, False):
                steps = prepare(num)
                with profiler if is_profiled else contextlib.nullcontext():
                    seconds[is_profiled] = seconds_of(steps)
                finish(num)
            if repeat:
                parts = {part: value * 1e3 / divisor for part, value in profiler.parts.items()}
                named = sum(profiler.parts.values()) - profiler.parts["other"]
                ratios = {"sum_of_step": named / seconds[False], "overhead": seconds[True] / seconds[False] - 1}
                samples.append({"step_ms": seconds[False] * 1e3 / divisor} | ratios | parts)
        table[name] = {key: spread([sample[key] for sample in samples]) for key in samples[0]}
    what = f"ms of a decode step by requests, the mean of {NUM_STEPS}; and of a prefill of 2,000 tokens in all"
    return {"what": what, "steps": table}


def measure_http(folder: Path, repeats: int) -> dict[str, Any]:
    """The parts of a step with 32 requests: through `LLM.generate`, and as 32 streams over HTTP."""
    from ..load.client import Load, run_load

    samples: dict[str, list[dict[str, float]]] = {"offline": [], "http": []}
    start = peers.describe("v0_5", peers.Places(folder))
    with peers.Engine("v0_5", start) as offline, online.server(model=str(folder)) as base_url:
        model = online.first_model(base_url, None)
        for repeat in range(repeats + 1):
            requests = random_prompts(HTTP_STREAMS, (HTTP_PROMPT,) * 2, (HTTP_OUTPUT,) * 2, seed=repeat)
            job = {
                "do": "generate",
                "prompts": [request.prompt for request in requests],
                "output_lens": [HTTP_OUTPUT] * HTTP_STREAMS,
            }
            profiles = {}
            for way in samples if repeat % 2 else reversed(samples):
                if way == "offline":
                    profiles[way] = offline.ask({"do": "profile", "job": job, "profiler": PROFILER})["profile"]
                    continue
                online.start_profile(base_url, None)
                results = asyncio.run(run_load(Load(base_url=base_url, model=model), requests))
                profiles[way] = online.stop_profile(base_url, None)
                if any(result.error for result in results):
                    raise ModelError(f"A request failed: {next(result.error for result in results if result.error)}.")
            if repeat:
                for way, profile in profiles.items():
                    entry = {"num_steps": profile["num_steps"], "step_ms": profile["ms_per_step"]}
                    loop = {"event_loop_cpu": profile["event_loop_cpu_ms"]} if way == "http" else {}
                    samples[way].append(entry | profile["parts_ms"] | loop)
    what = f"ms of a step, the mean of all steps of {HTTP_STREAMS} requests of {HTTP_PROMPT} + {HTTP_OUTPUT} tokens"
    return {
        "what": what,
        "steps": {name: {k: spread([s[k] for s in found]) for k in found[0]} for name, found in samples.items()},
    }


def measure_experiments(folder: Path, repeats: int, names: Sequence[str]) -> dict[str, Any]:
    """Those of `experiments.py` that are named."""
    from .experiments import Experiments

    experiments, results = Experiments(folder, repeats), {}
    for name in names:
        print(f"  {name} ...", file=sys.stderr, flush=True)
        results[name] = experiments.run(name)
    return results


def measure_prefix_caching(folder: Path, repeats: int) -> dict[str, Any]:
    """The requests of `compare`'s workload `shared_prefix`, without a prefix cache and with one that knows the prefix.

    A row for the table of experiments. It is not one of them, since this milestone has no prefix cache.
    """
    workload = WORKLOADS["shared_prefix"]
    samples: dict[str, list[dict[str, float]]] = {"without": [], "with a warm cache": []}
    with contextlib.ExitStack() as stack:
        engines = {}
        for way, is_cached in zip(samples, (False, True), strict=True):
            start = peers.describe("v0_6", peers.Places(folder, prefix_caching=is_cached))
            engines[way] = stack.enter_context(peers.Engine(f"v0_6 {way}", start))
        for repeat in range(repeats + 1):
            requests = workload.requests(seed=0, repeat=repeat)
            job = {
                "do": "generate",
                "prompts": [request.prompt for request in requests],
                "output_lens": [request.num_output_tokens for request in requests],
            }
            for way in samples if repeat % 2 else reversed(samples):
                answer = engines[way].ask(job)
                if repeat:
                    rate = workload.num_requests * workload.output_len / answer["seconds"]
                    samples[way].append({"tokens_per_s": rate, "mean_ttft_s": statistics.fmean(answer["ttfts"])})
    return {
        "what": f"{workload.num_requests} requests of {workload.input_len:,} + {workload.output_len} tokens, the first "
        f"{workload.shared_len:,} the same (v0.6)",
        "ways": {
            way: {key: spread([each[key] for each in found]) for key in found[0]} for way, found in samples.items()
        },
    }


def measure_operators(places: peers.Places, repeats: int, ours: str = "v0_5") -> dict[str, Any]:
    """By class of operator, ms of a decode step and of a prefill: ours, and vLLM's within one process, in turns."""
    names = [ours, *(["vllm-in-process"] if places.vllm_venv else [])]
    results: dict[str, Any] = {name: {} for name in names}
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(peers.Engine(name, peers.describe(name, places))) for name in names}
        for label, num, input_len, output_len in (
            *((str(num), num, 30, NUM_STEPS + 1) for num in OPERATOR_DECODES),
            ("prefill_2000", 1, OPERATOR_PREFILL, 1),
        ):
            answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for repeat in range(repeats + 1):
                prompts = random_ids(num, input_len, repeat)
                job = {"do": "operators", "prompts": prompts, "output_lens": [output_len] * num}
                for name in names if repeat % 2 else reversed(names):
                    answer = engines[name].ask(job | ({"profiler": PROFILER} if name == ours else {}))
                    answers[name] += [answer] if repeat else []
            for name, found in answers.items():
                results[name][label] = {
                    "num_steps": found[0]["num_steps"],
                    "ms": {c: spread([a["classes_ms"][c] for a in found]) for c in found[0]["classes_ms"]},
                    "step_ms": spread([a["step_ms"] for a in found]),
                    "largest": found[0]["largest"],
                }
    return {"what": "ms of a step by class of operator (a decode step; all steps of a prefill)", "engines": results}


def measure_machine(folder: Path, repeats: int) -> dict[str, Any]:
    """What the machine reads and multiplies at, by `cpu_rates`; and the model's sizes."""
    from common.config import ModelConfig
    from common.weights import expected_shapes

    from ..compare.rates import cpu_rates

    config = ModelConfig.from_folder(folder)
    matrices = {name: shape[0] * shape[1] for name, shape in expected_shapes(config).items() if len(shape) == 2}
    return {
        "what": "GB/s read by a sum over 512 MiB; float32 TFLOP/s of a product of 2,048 x 2,048, the better of two",
        **cpu_rates(**RATES, repeats=repeats),
        "model": {
            "layer_elements": sum(size for name, size in matrices.items() if ".layers." in name),
            "head_elements": config.vocab_size * config.hidden_size,
            "kv_elements_per_token": config.kv_elements_per_token,
            # Products and sums for one query and one key: a dot product in each head of each layer.
            "attention_elements_per_pair": 2 * config.num_layers * config.num_heads * config.head_dim,
        },
    }
