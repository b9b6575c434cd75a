"""What batching brings, and what it costs: `python -m v0_3_scheduler.measurements.batching`.

Ratios within one run, engines alternating where there are two. `--vllm-python` names the interpreter of an environment
with the real vLLM, which then answers the same prompts in a process of its own. The figures go to `batching.json`, each
with its recipe; the pages quote that file. Dropped in v0.4.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from common import llama, sampling
from common.measuring.child import Child
from common.measuring.recipe import recipe, spread
from common.sampling_params import SamplingParams, SamplingState
from common.weights import resolve

from .. import model_runner
from ..block_manager import BlockManager
from ..engine import LLMEngine
from ..llm import LLM
from ..request import Request
from ..scheduler import Scheduler

MILESTONE = (__package__ or "").partition(".")[0]
RESULTS = Path(__file__).with_suffix(".json")
BUDGETS = (64, 128, 256, 512, 1024, 2048)

# Answers jobs from standard input until it ends, in a process of its own; each job is a list of prompts (token ids) and
# a number of new tokens. Works for our milestones, and for vLLM, whose prompts of ids are spelled differently.
SERVER = """
import importlib, json, sys, time
name, arguments = sys.argv[1:]
package = importlib.import_module(name)
llm = package.LLM(**json.loads(arguments))
for line in sys.stdin:
    prompts, num_tokens = json.loads(line)
    params = package.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    inputs = [{"prompt_token_ids": p} for p in prompts] if name == "vllm" else prompts
    start = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    print("RESULT " + json.dumps([seconds, [list(o.outputs[0].token_ids) for o in outputs]]), flush=True)
"""


class Server(Child):
    """An engine in a process of its own, loaded before anything is measured."""

    def __init__(self, python: str, name: str, arguments: dict[str, Any], environment: dict[str, str]) -> None:
        super().__init__(name, [python, "-c", SERVER, name, json.dumps(arguments)], environment=environment)
        self.run([[1, 2, 3]], 1)

    def run(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens."""
        seconds, token_ids = self.ask([prompts, num_tokens])
        return seconds, token_ids


def main() -> None:
    """Run the measurements, print them and write them down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    parser.add_argument("--vllm-python", help="an interpreter that can import the real vLLM")
    parser.add_argument("--only", nargs="*", help="names of measurements")
    args = parser.parse_args()
    folder = resolve(None)
    measurements: dict[str, Callable[[], dict[str, Any]]] = {
        "sequential": lambda: measure_sequential(folder, args.repeats),
        "budget": lambda: measure_budget(folder, args.repeats),
        "step": lambda: measure_step(folder, args.repeats),
        "mixed_lengths": lambda: measure_mixed_lengths(folder, args.repeats),
        "sampling": lambda: measure_sampling(folder, args.repeats),
        "scheduler": lambda: measure_scheduler(args.repeats),
        "recompute": lambda: measure_recompute(folder, args.repeats),
    }
    if args.vllm_python:
        measurements["vllm"] = lambda: measure_vllm(folder, args.vllm_python, args.repeats)
    results = json.loads(args.out.read_text()) if args.only and args.out.exists() else {}
    made = recipe(
        model=folder.name.rpartition("-")[0], dtype="float32", threads=torch.get_num_threads(), repeats=args.repeats
    )
    for name in args.only or measurements:
        print(f"{name} ...", flush=True)
        results[name] = {"recipe": made, **measurements[name]()}  # a later run may renew one of them
        print(json.dumps(results[name], indent=1), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.out}")


def prompts_of(num: int, length: int = 30, seed: int = 0) -> list[list[int]]:
    """Random token ids, no two prompts alike."""
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(num)]


def measure_sequential(folder: Path, repeats: int) -> dict[str, Any]:
    """Output tokens/s of v0.1, one request after the other, and of this milestone, all at once; and the ratio."""
    table = {}
    with contextlib.ExitStack() as stack:
        servers = {
            "v0_1": stack.enter_context(Server(sys.executable, "v0_1_single_request", {"model": str(folder)}, {})),
            "v0_3": stack.enter_context(Server(sys.executable, MILESTONE, {"model": str(folder)}, {})),
        }
        for num in (4, 32):
            table[str(num)] = _alternate(servers, prompts_of(num), 32, repeats, over=("v0_3", "v0_1"))
    return {"what": "output tokens/s for so many requests of 30 + 32 tokens", "requests": table}


def measure_vllm(folder: Path, python: str, repeats: int) -> dict[str, Any]:
    """The same against vLLM on the CPU: decode throughput at 1, 8 and 32 requests, and a prefill of 2,000 tokens."""
    arguments = {"model": str(folder), "dtype": "float32", "max_model_len": 4096, "enable_prefix_caching": False}
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
    }
    version = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    table = {}
    with contextlib.ExitStack() as stack:
        servers = {
            "vllm": stack.enter_context(Server(python, "vllm", arguments, environment)),
            "v0_3": stack.enter_context(
                Server(sys.executable, MILESTONE, {"model": str(folder), "max_model_len": 4096}, {})
            ),
        }
        for num in (1, 8, 32):
            table[str(num)] = _alternate(servers, prompts_of(num), 64, repeats, over=("v0_3", "vllm"))
        prefill = _alternate(servers, prompts_of(1, 2000), 1, repeats, over=("vllm", "v0_3"), unit="seconds")
    return {
        "vllm_version": subprocess.check_output([python, "-c", version], text=True).strip(),
        "what": "output tokens/s for so many requests of 30 + 64 tokens; seconds for a prompt of 2,000 and one token",
        "requests": table,
        "prefill_2000": prefill,
    }


def _alternate(
    servers: dict[str, Server],
    prompts: list[list[int]],
    num_tokens: int,
    repeats: int,
    *,
    over: tuple[str, str],
    unit: str = "tokens/s",
) -> dict[str, Any]:
    """Both engines on the same prompts in turns, after a warm-up; `ratio` is the first of `over` by the second."""
    values: dict[str, list[float]] = {name: [] for name in servers}
    same = 0
    for repeat in range(repeats + 1):
        tokens = []
        for name, server in servers.items() if repeat % 2 else reversed(servers.items()):
            seconds, token_ids = server.run(prompts, num_tokens)
            tokens.append(token_ids)
            if repeat:
                values[name].append(len(prompts) * num_tokens / seconds if unit == "tokens/s" else seconds)
        same = sum(a == b for a, b in zip(*tokens, strict=True))
    ratios = [a / b for a, b in zip(values[over[0]], values[over[1]], strict=True)]
    return {
        **{name: spread(v) for name, v in values.items()},
        "ratio": spread(ratios),
        "same_tokens": f"{same} of {len(prompts)}",
    }


def measure_budget(folder: Path, repeats: int) -> dict[str, Any]:
    """By token budget: output tokens/s of a mixed load, and the longest and median step, in ms."""
    prompts = [p for length in (20, 60, 200, 600) for p in prompts_of(4, length, seed=length)]
    table = {}
    for budget in BUDGETS:
        llm = LLM(folder, max_num_batched_tokens=budget, max_num_seqs=16)
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        rates, longest, medians = [], [], []
        for repeat in range(repeats + 1):
            times: list[float] = []
            clock = [time.perf_counter()]

            def on_step(_: object, times: list[float] = times, clock: list[float] = clock) -> None:
                now = time.perf_counter()
                times.append((now - clock[0]) * 1e3)
                clock[0] = now

            llm.engine.on_step = on_step
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if repeat:
                rates.append(len(prompts) * 32 / (time.perf_counter() - start))
                longest.append(max(times))
                medians.append(statistics.median(times))
        table[str(budget)] = {
            "rate": spread(rates),
            "longest_step_ms": spread(longest),
            "median_step_ms": spread(medians),
        }
    return {"what": "16 prompts of 20 to 600 tokens, 32 new tokens each", "budgets": table}


def measure_step(folder: Path, repeats: int) -> dict[str, Any]:
    """Where a step's time goes, in ms: its parts are wrapped in clocks, and the rest is what is left.

    The mean of 20 decode steps of so many requests; and the prefill of a prompt of 2,000 tokens, all of its steps.
    """
    llm = LLM(folder)
    engine, parts = llm.engine, dict.fromkeys(("linear_layers", "attention_and_gather", "sampling", "scheduling"), 0.0)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                parts[part] += time.perf_counter() - start

        return call

    def split(num_steps: int, run: Callable[[], object]) -> dict[str, float]:
        """Milliseconds a step of each part while `run` runs."""
        parts.update(dict.fromkeys(parts, 0.0))
        start = time.perf_counter()
        run()
        total = time.perf_counter() - start
        seconds = {"total": total, **parts, "the_rest": total - sum(parts.values())}
        return {name: value * 1e3 / num_steps for name, value in seconds.items()}

    def decode(num: int) -> dict[str, float]:
        for number, prompt in enumerate(prompts_of(num)):
            engine.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        for _ in range(5):
            engine.step()
        shares = split(20, lambda: [engine.step() for _ in range(20)])
        while engine.has_unfinished_requests():
            engine.step()
        return shares

    def prefill(_: int) -> dict[str, float]:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        [prompt] = prompts_of(1, 2000)
        return split(1, lambda: llm.generate([prompt], params, use_tqdm=False))

    scheduler, kv_cache = engine.scheduler, engine.model_runner.kv_cache
    table = {}
    with (
        mock.patch.object(llama, "linear", timed("linear_layers", llama.linear)),
        mock.patch.object(kv_cache, "attend", timed("attention_and_gather", kv_cache.attend)),
        mock.patch.object(model_runner, "sample", timed("sampling", sampling.sample)),
        mock.patch.object(scheduler, "schedule", timed("scheduling", scheduler.schedule)),
        mock.patch.object(scheduler, "update", timed("scheduling", scheduler.update)),
    ):
        for name, num in {"1": 1, "4": 4, "8": 8, "32": 32, "prefill_2000": 0}.items():
            runs = [decode(num) if num else prefill(num) for _ in range(repeats + 1)][1:]
            table[name] = {part: spread([run[part] for run in runs]) for part in runs[0]}
    return {"what": "ms of a decode step by requests, the mean of 20; and of a prefill of 2,000 tokens", "steps": table}


def measure_mixed_lengths(folder: Path, repeats: int) -> dict[str, Any]:
    """Milliseconds of a decode step of 15 short requests, of one of 3,000 tokens, and of all 16 together."""
    engine = LLMEngine(folder)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    groups = {"15_short": prompts_of(15), "1_long": prompts_of(1, 3000)}
    groups["together"] = groups["15_short"] + groups["1_long"]
    times: dict[str, list[float]] = {name: [] for name in groups}
    for repeat in range(repeats + 1):
        for name, prompts in groups.items():
            for number, prompt in enumerate(prompts):
                engine.add_request(str(number), prompt, params)
            while engine.scheduler.waiting or any(
                r.num_computed_tokens < r.num_prompt_tokens for r in engine.scheduler.running
            ):
                engine.step()
            start = time.perf_counter()
            for _ in range(5):
                engine.step()
            if repeat:
                times[name].append((time.perf_counter() - start) * 1e3 / 5)
            while engine.has_unfinished_requests():
                engine.step()
    return {"what": "ms of a decode step", "step": {name: spread(values) for name, values in times.items()}}


def measure_sampling(folder: Path, repeats: int) -> dict[str, Any]:
    """Output tokens/s at 32 requests, greedy and with temperature 0.8 and top_p 0.95; and what sampling costs of it.

    Real questions: after random ids the model is unsure of everything, and the filters have to look at most of the
    vocabulary.
    """
    llm = LLM(folder)
    questions = [f"Tell me something about the number {number}, in a few sentences." for number in range(32)]
    prompts = [llm.tokenizer.chat_token_ids([{"role": "user", "content": question}]) for question in questions]
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    }
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(repeats + 1):
        for name, extra in kinds.items():
            start = time.perf_counter()
            llm.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True, **extra), use_tqdm=False)
            if repeat:
                rates[name].append(32 * 32 / (time.perf_counter() - start))
    costs = [1 - sampled / greedy for sampled, greedy in zip(rates["sampled"], rates["greedy"], strict=True)]
    return {
        "what": "output tokens/s at 32 requests",
        **{n: spread(r) for n, r in rates.items()},
        "cost": spread(costs),
    }


def measure_scheduler(repeats: int) -> dict[str, Any]:
    """Milliseconds for `schedule` and `update` of a step with 256 running requests that decode."""
    times = []
    for _ in range(repeats):
        scheduler = Scheduler(
            BlockManager(8192, 16), max_num_batched_tokens=4096, max_num_seqs=256, max_request_len=4096
        )
        params = SamplingParams(max_tokens=1000)
        for number in range(256):
            scheduler.add(Request(str(number), SamplingState.create(params, [1] * 16, (2,), seed=0)))
        for step in range(60):
            start = time.perf_counter()
            scheduled = scheduler.schedule()
            scheduler.update(scheduled, {request.request_id: 7 for request in scheduled.requests})
            if step >= 10:
                times.append((time.perf_counter() - start) * 1e3)
    return {"what": "ms of schedule() and update() at 256 running requests", "step": spread(times)}


def measure_recompute(folder: Path, repeats: int) -> dict[str, Any]:
    """What it takes to bring a preempted request of 500 tokens back: computing it again, or copying its KV."""
    engine = LLMEngine(folder, max_num_batched_tokens=512, max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    recompute, swap = [], []
    num_blocks = -(-500 // engine.scheduler.block_manager.block_size)
    kv = engine.model_runner.kv_cache.kv
    table = torch.arange(num_blocks) * 2
    for repeat in range(repeats + 1):
        engine.add_request(str(repeat), prompts_of(1, 500, seed=repeat)[0], params)
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        middle = time.perf_counter()
        kv[:, :, table] = kv[:, :, table].clone()
        if repeat:
            recompute.append((middle - start) * 1e3)
            swap.append((time.perf_counter() - middle) * 1e3)
    return {
        "what": "ms to bring back a request of 500 tokens",
        "recompute": spread(recompute),
        "swap_within_memory": spread(swap),
        "mib": round(kv[:, :, table].nbytes / 2**20, 1),
    }


if __name__ == "__main__":
    main()
