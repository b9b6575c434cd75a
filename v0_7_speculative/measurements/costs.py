"""What a guess costs: a step that checks K drafts, and one draft pass of the model's first E layers with its head.

One request decodes. In each of its steps the drafter proposes as many wrong tokens as the moment asks for, so that
every step adds one token, whatever it checks, and all are measured on the same context. Draft passes are timed between
them: what they write into the KV cache is written again by the step.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from common.llama import Llama
from common.measuring.recipe import spread
from common.sampling_params import SamplingParams

from ..drafter import EarlyExitDrafter, _pass
from ..llm import LLM
from ..request import Request
from ..scheduler import SchedulerOutput

MOST_DRAFTS = 8
EXIT_LAYERS = (1, 2, 5, 11, 15, 20, 25, 28, 29)
CYCLES = 8  # of all kinds of steps, in one repeat


class WrongDrafter:
    """Proposes `num_drafts` tokens that are not the model's; first times a pass of each of these drafters."""

    def __init__(self, exits: list[EarlyExitDrafter]) -> None:
        self.exits, self.num_drafts = exits, 0
        self.token_id = 100
        self.seconds = 0.0  # of the last call of `draft`, not part of the step's own time
        self.pass_seconds: dict[int, float] = {}

    def count(self, request: Request, most: int) -> int:
        """As the moment asks."""
        return min(self.num_drafts, most)

    @torch.inference_mode()
    def draft(self, scheduled: SchedulerOutput) -> None:
        """Time the drafters that are due, then propose."""
        start = time.perf_counter()
        for drafter in self.exits if self.num_drafts == MOST_DRAFTS else ():
            begin = time.perf_counter()
            _pass(scheduled, [0], 0, drafter.kv_cache, drafter._next_tokens)
            self.pass_seconds[drafter.exit_layer] = time.perf_counter() - begin
        for request, num_drafts in zip(scheduled.requests, scheduled.num_draft_tokens, strict=True):
            request.draft_token_ids = [self.token_id] * num_drafts
        self.seconds = time.perf_counter() - start


def measure_costs(make: Callable[..., LLM], prompt: list[int], repeats: int) -> dict[str, Any]:
    """Milliseconds, and in plain steps of the same repeat: a step of 1 to 9 rows, a pass of some layers."""
    llm = make("ngram", MOST_DRAFTS)
    engine = llm.engine
    assert isinstance(engine.model, Llama)
    runner = engine.model_runner
    exits = [EarlyExitDrafter(engine.model, runner.kv_cache, engine.vocab_size, layer) for layer in EXIT_LAYERS]
    drafter = WrongDrafter(exits)
    runner.drafter, engine.scheduler.count_drafts = drafter, drafter.count
    steps: dict[int, list[float]] = {num: [] for num in range(MOST_DRAFTS + 1)}  # one median for each repeat
    passes: dict[int, list[float]] = {layer: [] for layer in EXIT_LAYERS}
    for repeat in tqdm(range(repeats + 1), desc="costs", unit="round"):
        cycles = CYCLES if repeat else 1
        num_tokens = 2 + cycles * (MOST_DRAFTS + 1) + MOST_DRAFTS  # the last steps would have room for fewer drafts
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        engine.add_request("costs", None, params, prompt_token_ids=prompt)
        drafter.num_drafts = 0
        engine.step()
        engine.step()
        of_steps: dict[int, list[float]] = {num: [] for num in steps}
        of_passes: dict[int, list[float]] = {layer: [] for layer in passes}
        for cycle in range(cycles):
            for i in range(MOST_DRAFTS + 1):
                drafter.num_drafts = (cycle + i) % (MOST_DRAFTS + 1)
                begin = time.perf_counter()
                engine.step()
                of_steps[drafter.num_drafts].append(time.perf_counter() - begin - drafter.seconds)
            for layer, seconds in drafter.pass_seconds.items():
                of_passes[layer].append(seconds)
        engine.abort_request("costs")
        if repeat:
            for num, seconds_of in of_steps.items():
                steps[num].append(1e3 * statistics.median(seconds_of))
            for layer, seconds_of in of_passes.items():
                passes[layer].append(1e3 * statistics.median(seconds_of))
    plain = steps[0]
    # A pass is E layers and the rest (embedding, head, argmax): a line through the shortest and the longest.
    first, last = EXIT_LAYERS[0], EXIT_LAYERS[-1]
    layer_ms = [(b - a) / (last - first) for a, b in zip(passes[first], passes[last], strict=True)]
    head_ms = [a - first * each for a, each in zip(passes[first], layer_ms, strict=True)]
    return {
        "num_layers": engine.model.config.num_layers,
        "what": f"one request of {len(prompt)} to {len(prompt) + num_tokens} tokens; rows of a step, layers of a pass",
        "steps": {str(num + 1): _entry(ms, plain) for num, ms in steps.items()},
        "passes": {str(layer): _entry(ms, plain) for layer, ms in passes.items()},
        "layer": _entry(layer_ms, plain),
        "head": _entry(head_ms, plain),
    }


def _entry(ms: list[float], plain: list[float]) -> dict[str, Any]:
    return {"ms": spread(ms), "plain_steps": spread([a / b for a, b in zip(ms, plain, strict=True)])}
