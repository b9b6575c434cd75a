"""Experiments that isolate one decision each: the same load with it and without it, in turns, in one process.

Each returns what it did and, for each way, what was measured, as medians and spreads over the repeats. `attribute.py`
runs them. The engines share one set of weights; only what an experiment is about differs between two ways.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import loading
from common.llama import Llama
from common.measuring.recipe import spread
from common.sampling_params import SamplingParams
from common.weights import load_weights

from ...engine import LLMEngine
from ...scheduler import SchedulerOutput
from ..load.workloads import random_ids, random_prompts

Way = Callable[[], dict[str, float]]


class Experiments:
    """All of them, on one model; `NAMES` are those of the methods below, in the order of the page.

    Args:
        folder: the model's, in Hugging Face layout.
        repeats: rounds that count; one before warms up.
    """

    NAMES = (
        "batching",
        "static_batching",
        "paging",
        "block_size",
        "chunked_prefill",
        "token_budget",
        "mixed_step",
        "packed_matrices",
    )

    def __init__(self, folder: Path, repeats: int) -> None:
        self.folder, self.repeats = folder, repeats
        self.model, self.tokenizer = loading.load(folder, None, device="cpu", dtype="float32")

    def run(self, name: str) -> dict[str, Any]:
        """One of `NAMES`."""
        return getattr(self, name)()

    def batching(self) -> dict[str, Any]:
        """One request at a time, or all."""
        prompts = random_ids(16, 30)

        def way(max_num_seqs: int) -> Way:
            engine = self._engine(max_num_seqs=max_num_seqs)
            return lambda: serve(engine, prompts, [32] * 16)

        return self._compare("16 requests of 30 + 32 tokens", {"one at a time": way(1), "together": way(256)})

    def static_batching(self) -> dict[str, Any]:
        """Eight at a time until the last of the eight is done, or the next one as soon as a place is free."""
        prompts = random_ids(24, 30)
        lens = [8 + 24 * (i % 5) for i in range(24)]  # 8 to 104 tokens, mixed
        engine = self._engine(max_num_seqs=8)

        def static() -> dict[str, float]:
            start, tokens = time.perf_counter(), 0
            for i in range(0, 24, 8):
                serve(engine, prompts[i : i + 8], lens[i : i + 8])
                tokens += sum(lens[i : i + 8])
            return {"tokens_per_s": tokens / (time.perf_counter() - start)}

        def continuous() -> dict[str, float]:
            return {"tokens_per_s": serve(engine, prompts, lens)["tokens_per_s"]}

        return self._compare(
            "24 requests of 30 + 8 to 104 tokens, 8 places", {"static": static, "continuous": continuous}
        )

    def paging(self) -> dict[str, Any]:
        """A pool for 4,096 tokens in slabs of 512, each for a whole request, or in blocks of 16."""
        requests = random_prompts(24, (20, 460), (16, 48), seed=3)
        prompts = [request.prompt for request in requests]
        lens = [request.num_output_tokens for request in requests]

        def way(block_size: int) -> Way:
            engine = self._engine(block_size=block_size, num_blocks=4096 // block_size, max_model_len=512)
            return lambda: serve(engine, prompts, lens)

        return self._compare(
            "24 requests of 20 to 460 + 16 to 48 tokens", {"slabs of 512": way(512), "blocks of 16": way(16)}
        )

    def block_size(self) -> dict[str, Any]:
        """The same decodes on blocks of 8, 16, 32 and 64 tokens."""
        prompts = random_ids(32, 100)

        def way(size: int) -> Way:
            engine = self._engine(block_size=size)

            def run() -> dict[str, float]:
                results = serve(engine, prompts, [24] * 32)
                return {name: results[name] for name in ("tokens_per_s", "tokens_of_blocks")}

            return run

        return self._compare("32 requests of 100 + 24 tokens", {str(size): way(size) for size in (8, 16, 32, 64)})

    def chunked_prefill(self) -> dict[str, Any]:
        """Eight requests write; one of 3,000 tokens comes, and is computed in chunks or in one step."""
        return self._arrival(3000, {"in chunks of 512": 512, "in one step": 4096})

    def token_budget(self) -> dict[str, Any]:
        """The same arrival under other budgets: how long a step may take, against how fast the prompt is done."""
        return self._arrival(2000, {str(budget): budget for budget in (64, 128, 256, 512, 1024, 2048)})

    def _arrival(self, length: int, budgets: dict[str, int]) -> dict[str, Any]:
        """A prompt of so many tokens comes while eight requests write, under each of these budgets."""
        short, [long] = random_ids(8, 30), random_ids(1, length)
        ways: dict[str, Way] = {
            name: partial(interrupt, self._engine(max_num_batched_tokens=budget), short, long)
            for name, budget in budgets.items()
        }
        return self._compare(f"8 requests write when a prompt of {length:,} tokens comes", ways)

    def mixed_step(self) -> dict[str, Any]:
        """Prompts one after the other and decodes together, each in a pass of its own, or all in one packed pass."""
        requests = random_prompts(48, (20, 60), (8, 32), seed=5)
        prompts = [request.prompt for request in requests]
        lens = [request.num_output_tokens for request in requests]

        def way(separate: bool) -> Way:
            engine = self._engine(max_num_seqs=16)
            if separate:
                run = engine.model_runner.run
                engine.model_runner.run = lambda scheduled: _separately(run, scheduled)  # type: ignore[method-assign]

            def measure() -> dict[str, float]:
                results = serve(engine, prompts, lens)
                return {name: results[name] for name in ("tokens_per_s", "mean_ttft_s")}

            return measure

        return self._compare(
            "48 requests of 20 to 60 + 8 to 32 tokens, 16 places",
            {"separate passes": way(True), "one mixed pass": way(False)},
        )

    def packed_matrices(self) -> dict[str, Any]:
        """Matrices as they lie in the file, or packed once for oneDNN's product."""
        config, device, dtype = self.model.config, self.model.device, self.model.dtype
        plain = Llama(config, load_weights(self.folder, config, device, dtype))
        ways: dict[str, Way] = {}
        for name, model in (("plain", plain), ("packed", self.model)):
            for num in (1, 8, 32):
                engine = LLMEngine(model, tokenizer=self.tokenizer)
                ways[f"{name}, {num}"] = partial(serve, engine, random_ids(num, 30), [24] * num)
        return self._compare("1, 8 and 32 requests of 30 + 24 tokens", ways)

    def _engine(self, **engine_args: Any) -> LLMEngine:
        return LLMEngine(self.model, tokenizer=self.tokenizer, **engine_args)

    def _compare(self, what: str, ways: dict[str, Way]) -> dict[str, Any]:
        """Every way in turns, in alternating order; what each measured, in medians and spreads."""
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for repeat in range(self.repeats + 1):
            for name in ways if repeat % 2 else reversed(ways):
                result = ways[name]()
                if repeat:
                    samples[name].append(result)
        return {
            "what": what,
            "ways": {
                name: {key: spread([result[key] for result in results]) for key in results[0]}
                for name, results in samples.items()
            },
        }


def params_of(num_tokens: int) -> SamplingParams:
    """Greedy, and of a fixed length."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def serve(engine: LLMEngine, prompts: Sequence[Any], output_lens: Sequence[int]) -> dict[str, float]:
    """All at once until they are done.

    Returns:
        Output tokens/s, mean seconds to the first token, the most requests that ran at once, and how much of the blocks
        in use held tokens, the mean over the steps.
    """
    start = time.perf_counter()
    for number, (prompt, num_tokens) in enumerate(zip(prompts, output_lens, strict=True)):
        engine.add_request(str(number), prompt, params_of(num_tokens))
    first: dict[str, float] = {}
    most, filled = 0, []
    manager = engine.scheduler.block_manager
    while engine.has_unfinished_requests():
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - start)
        running = engine.scheduler.running
        most = max(most, len(running))
        if used := (manager.num_blocks - manager.num_free_blocks) * manager.block_size:
            filled.append(sum(request.num_computed_tokens for request in running) / used)
    seconds = time.perf_counter() - start
    return {
        "tokens_per_s": sum(output_lens) / seconds,
        "mean_ttft_s": statistics.fmean(first.values()),
        "most_at_once": float(most),
        "tokens_of_blocks": statistics.fmean(filled) if filled else 1.0,
    }


def interrupt(engine: LLMEngine, short: Sequence[list[int]], long: list[int]) -> dict[str, float]:
    """While `short` are being answered, `long` comes.

    Returns:
        Its seconds to the first token; the longest and the median gap between two tokens of the others, in ms.
    """
    for number, prompt in enumerate(short):
        engine.add_request(str(number), prompt, params_of(200))
    gaps = []
    for _ in range(8):
        engine.step()
    start = clock = time.perf_counter()
    engine.add_request("long", long, params_of(2))
    ttft = 0.0
    while not ttft:
        outputs = engine.step()
        now = time.perf_counter()
        gaps.append((now - clock) * 1e3)
        clock = now
        if any(output.request_id == "long" for output in outputs):
            ttft = now - start
    for number in [*range(len(short)), "long"]:
        engine.abort_request(str(number))
    return {"ttft_s": ttft, "longest_gap_ms": max(gaps), "median_gap_ms": statistics.median(gaps)}


def _separately(run: Callable[[SchedulerOutput], dict[str, Any]], scheduled: SchedulerOutput) -> dict[str, Any]:
    """The same step as passes of their own: one for each prompt, and one for all decodes."""
    steps = list(zip(scheduled.requests, scheduled.num_scheduled_tokens, strict=True))
    sampled: dict[str, Any] = {}
    for request, num_tokens in steps:
        if num_tokens > 1:
            sampled |= run(scheduled.only([request]))
    return sampled | run(scheduled.only([request for request, num_tokens in steps if num_tokens == 1]))
