"""What shared blocks bring, and what they cost: `python -m v0_6_prefix_cache.measurements.sharing`.

    shared_prefix   16 requests at once behind the same 1,000 tokens: without the cache, with a cold and a warm one
    hashing         prompts that share nothing: what looking for them and publishing their blocks costs
    choices         n = 8 for one prompt of 1,000 tokens, beside eight separate requests

The engines share one set of weights and take turns in one process; a ratio is taken within a round. Prompts are random
token ids, new in every round. The figures go to `sharing.json` with their recipe; the pages quote that file. Each part
takes one to three minutes; `--only` names some, and leaves the others as the file has them.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import loading
from common.measuring.recipe import recipe, spread
from common.outputs import RequestOutput
from common.sampling_params import SamplingParams
from common.weights import resolve

from ..llm import LLM
from ..model_runner import Sampled
from ..scheduler import SchedulerOutput

RESULTS = Path(__file__).with_suffix(".json")
TOKEN_BUDGET = 512  # max_num_batched_tokens
NUM_REQUESTS, SHARED_LEN, TAIL_LEN, OUTPUT_LEN = 16, 1000, 20, 16  # of `shared_prefix`
UNIQUE_LEN, UNIQUE_OUTPUT_LEN = 500, 64  # of `hashing`, 16 requests as well
NUM_WARMUP = 2  # requests of the round that warms up, in these two
NUM_CHOICES, CHOICES_PROMPT_LEN, CHOICES_OUTPUT_LEN = 8, 1000, 64
SEED = 0

Samples = dict[str, list[dict[str, float]]]  # of each way, one entry a round


def main() -> None:
    """Run the parts, print what they measured and write it down."""
    measurements = {"shared_prefix": measure_shared_prefix, "hashing": measure_hashing, "choices": measure_choices}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=measurements, default=list(measurements))
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count, after a short one that warms up")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    folder = resolve(None)
    model, tokenizer = loading.load(folder, None, device="cpu", dtype="float32")
    llms = {
        is_cached: LLM(model, tokenizer=tokenizer, enable_prefix_caching=is_cached, max_num_batched_tokens=TOKEN_BUDGET)
        for is_cached in (True, False)
    }
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.only:
        made = recipe(
            model=folder.name.rpartition("-")[0],
            dtype="float32",
            threads=torch.get_num_threads(),
            token_budget=TOKEN_BUDGET,
            block_size=16,
            seed=SEED,
            warmup_rounds=1,
            warmup_requests=NUM_WARMUP,
            repeats=args.repeats,
        )
        results[name] = {"recipe": made, **measurements[name](llms[True], llms[False], args.repeats)}
        print(json.dumps({key: value for key, value in results[name].items() if key != "recipe"}, indent=1))
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def measure_shared_prefix(cached: LLM, uncached: LLM, repeats: int) -> dict[str, Any]:
    """Time to first token and prompt tokens/s of the same requests, without the cache, with a cold and a warm one.

    A warm cache has seen the prefix in requests with other tails. The prompt throughput is that of all prompt tokens,
    cached or not, until the last request has its first token.
    """
    samples: Samples = {"uncached": [], "cold": [], "warm": []}
    same = 0
    for repeat, rng in _rounds(repeats, "16 on one prefix"):
        prefix = _random_ids(rng, SHARED_LEN)
        num = NUM_REQUESTS if repeat else NUM_WARMUP
        prompts = [prefix + _random_ids(rng, TAIL_LEN) for _ in range(num)]
        others = [prefix + _random_ids(rng, TAIL_LEN) for _ in range(num)]
        answers: dict[str, list[RequestOutput]] = {}
        # The cold requests warm the cache for the warm ones; those without the cache come before or after the two.
        for way in ("cold", "warm", "uncached") if repeat % 2 else ("uncached", "cold", "warm"):
            if way == "cold":
                cached.reset_prefix_cache()
            llm = uncached if way == "uncached" else cached
            figures, answers[way] = _first_tokens(llm, others if way == "cold" else prompts)
            if repeat:
                samples[way].append(figures)
        if repeat:
            pairs = zip(answers["warm"], answers["uncached"], strict=True)
            same += sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs)
    return {
        "what": f"{NUM_REQUESTS} requests at once: {SHARED_LEN} tokens that all share, {TAIL_LEN} of their own, "
        f"{OUTPUT_LEN} answered",
        "ways": _spreads(samples),
        "to_uncached": _ratios(samples, "uncached"),
        "same_answers": f"{same} of {NUM_REQUESTS * repeats}",
    }


def _first_tokens(llm: LLM, prompts: list[list[int]]) -> tuple[dict[str, float], list[RequestOutput]]:
    seconds, outputs, start = _generate(llm, prompts, [_greedy(OUTPUT_LEN)] * len(prompts))
    ttfts = [output.metrics.first_token_time - start for output in outputs]
    return {
        "median_ttft_s": statistics.median(ttfts),
        "longest_ttft_s": max(ttfts),
        "prompt_tokens_per_s": sum(map(len, prompts)) / max(ttfts),
        "seconds": seconds,
    }, outputs


def measure_hashing(cached: LLM, uncached: LLM, repeats: int) -> dict[str, Any]:
    """Prompts that nobody has seen before: tokens/s with caching on and off, and the time that hashing takes.

    Two clocks are read around each call of `find_prefix` and `publish`, which costs a few microseconds a step.
    """
    samples: Samples = {"caching_on": [], "caching_off": []}
    for repeat, rng in _rounds(repeats, "Nothing shared"):
        prompts = [_random_ids(rng, UNIQUE_LEN) for _ in range(NUM_REQUESTS if repeat else NUM_WARMUP)]
        for way in samples if repeat % 2 else reversed(samples):
            llm = cached if way == "caching_on" else uncached
            with _clocked(llm.engine.scheduler.block_manager, ("find_prefix", "publish")) as clock:
                seconds, _, _ = _generate(llm, prompts, [_greedy(UNIQUE_OUTPUT_LEN)] * len(prompts))
            if repeat:
                num_tokens = NUM_REQUESTS * (UNIQUE_LEN + UNIQUE_OUTPUT_LEN)
                figures = {"tokens_per_s": num_tokens / seconds, "seconds": seconds}
                figures |= {f"{verb}_ms": value * 1e3 for verb, value in clock.items()}
                samples[way].append(figures | {"hashing_percent": 100 * sum(clock.values()) / seconds})
    return {
        "what": f"{NUM_REQUESTS} requests of {UNIQUE_LEN} + {UNIQUE_OUTPUT_LEN} tokens that share nothing; prompt and "
        "output tokens/s",
        "ways": _spreads(samples),
        "to_caching_off": _ratios(samples, "caching_off", ("tokens_per_s",)),
    }


@contextmanager
def _clocked(owner: object, verbs: Sequence[str]) -> Iterator[dict[str, float]]:
    """Seconds that each of an object's verbs takes until the block ends."""
    seconds = dict.fromkeys(verbs, 0.0)

    def clocked(verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            seconds[verb] += time.perf_counter() - start
            return result

        return run

    for verb in verbs:
        setattr(owner, verb, clocked(verb, getattr(owner, verb)))
    try:
        yield seconds
    finally:
        for verb in verbs:
            delattr(owner, verb)


def measure_choices(cached: LLM, uncached: LLM, repeats: int) -> dict[str, Any]:
    """Prompt tokens computed, the most blocks in use and seconds: `n` choices, and as many requests with their seeds.

    Choices share their prompt's blocks with caching switched off as well.
    """
    samples: Samples = {"choices": [], "choices_without_caching": [], "separate": []}
    same = 0
    for repeat, rng in _rounds(repeats, f"{NUM_CHOICES} choices"):
        prompt = _random_ids(rng, CHOICES_PROMPT_LEN)
        answers: dict[str, list[list[int]]] = {}
        for way in samples if repeat % 2 else reversed(samples):
            llm = cached if way == "choices" else uncached
            if way == "separate":
                asked = [_sampled(CHOICES_OUTPUT_LEN, repeat + i, 1) for i in range(NUM_CHOICES)]
            else:
                asked = [_sampled(CHOICES_OUTPUT_LEN, repeat, NUM_CHOICES)]
            with _watched(llm) as seen:
                seconds, outputs, _ = _generate(llm, [prompt] * len(asked), asked)
            answers[way] = [choice.token_ids for output in outputs for choice in output.outputs]
            if repeat:
                samples[way].append({**seen, "seconds": seconds})
        if repeat:
            same += sum(a == b for a, b in zip(answers["choices"], answers["separate"], strict=True))
    return {
        "what": f"{NUM_CHOICES} answers of {CHOICES_OUTPUT_LEN} tokens to one prompt of {CHOICES_PROMPT_LEN}",
        "ways": _spreads(samples),
        "to_separate": _ratios(samples, "separate"),
        "same_answers": f"{same} of {NUM_CHOICES * repeats}",
    }


@contextmanager
def _watched(llm: LLM) -> Iterator[dict[str, float]]:
    """Over the steps until the block ends: prompt tokens that were computed, and the most blocks that were in use."""
    runner, manager = llm.engine.model_runner, llm.engine.scheduler.block_manager
    run = runner.run
    seen = {"prompt_tokens_computed": 0.0, "most_blocks": 0.0}

    def watch(scheduled: SchedulerOutput) -> dict[str, Sampled]:
        for request, num_tokens in zip(scheduled.requests, scheduled.num_scheduled_tokens, strict=True):
            left = request.num_prompt_tokens - request.num_computed_tokens
            seen["prompt_tokens_computed"] += max(0, min(num_tokens, left))
        seen["most_blocks"] = max(seen["most_blocks"], manager.num_blocks - manager.num_free_blocks)
        return run(scheduled)

    runner.run = watch  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del runner.run


def _rounds(repeats: int, title: str) -> Iterator[tuple[int, random.Random]]:
    """Numbers of rounds, the first one to warm up, each with random numbers of its own."""
    for repeat in tqdm(range(repeats + 1), desc=title, unit="round"):
        yield repeat, random.Random(f"{SEED} {title} {repeat}")


def _random_ids(rng: random.Random, num: int) -> list[int]:
    """Ordinary tokens of the vocabulary."""
    return [rng.randint(100, 40_000) for _ in range(num)]


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _sampled(num_tokens: int, seed: int, n: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=num_tokens, ignore_eos=True)


def _generate(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[float, list[RequestOutput], float]:
    """Seconds, answers, and when it began."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, outputs, start


def _spreads(samples: Samples) -> dict[str, Any]:
    return {way: {key: spread([each[key] for each in rounds]) for key in rounds[0]} for way, rounds in samples.items()}


def _ratios(samples: Samples, base: str, only: Sequence[str] = ()) -> dict[str, Any]:
    """Of every other way, each figure (or `only` some) by that of `base` in the same round."""
    return {
        way: {
            key: spread([a[key] / b[key] for a, b in zip(rounds, samples[base], strict=True)])
            for key in only or rounds[0]
        }
        for way, rounds in samples.items()
        if way != base
    }


if __name__ == "__main__":
    main()
