"""Drafters for tests: one that guesses what it is told to, and a small model made for TINY, which is right at times.

`SPECULATION` names every way to draft that TINY allows; `speculate` puts the first kind into an engine.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.kit.tokenizers import save_byte_tokenizer

SPECULATION = ("ngram", "early_exit", "draft_model", "itself")
NOISE = 0.008  # added to TINY's weights: some of its guesses are right, some are not


class Guesses:
    """Drafts what `guess(request, index)` says of a request's output token `index`; as many as it may.

    `log` has, of each step, how many drafts each request got, by its id.
    """

    def __init__(self, guess: Callable[[Any, int], int]) -> None:
        self.guess = guess
        self.log: list[dict[str, int]] = []

    def count(self, request: Any, most: int) -> int:
        return most

    def draft(self, scheduled: Any) -> None:
        self.log.append({})
        for request, num_drafts in zip(scheduled.requests, scheduled.num_draft_tokens, strict=True):
            first = len(request.sampling.output_token_ids)
            request.draft_token_ids = [self.guess(request, first + place) for place in range(num_drafts)]
            self.log[-1][request.request_id] = num_drafts


def speculate(engine: Any, guess: Callable[[Any, int], int], num_tokens: int) -> Guesses:
    """Let an engine that was made without a drafter have this one."""
    drafter = Guesses(guess)
    engine.scheduler.num_speculative_tokens, engine.scheduler.count_drafts = num_tokens, drafter.count
    engine.model_runner.drafter = drafter
    return drafter


def right(answers: dict[tuple[int, ...], Sequence[int]]) -> Callable[[Any, int], int]:
    """Guesses from the prompts' answers; past their end it says 0."""

    def guess(request: Any, index: int) -> int:
        answer = answers[tuple(request.sampling.prompt_token_ids)]
        return answer[index] if index < len(answer) else 0

    return guess


def wrong(answers: dict[tuple[int, ...], Sequence[int]]) -> Callable[[Any, int], int]:
    """Another token than that, always."""
    guess = right(answers)
    return lambda request, index: (guess(request, index) + 1) % 256


def options(method: str, tiny: Any, num_tokens: int = 4) -> dict[str, Any]:
    """The flags of one way to draft for TINY."""
    flags: dict[str, Any] = {"speculative_method": method, "num_speculative_tokens": num_tokens}
    if method == "early_exit":
        flags["exit_layer"] = 1
    elif method == "ngram":
        flags["ngram_min"] = 1
    elif method in ("draft_model", "itself"):
        folder = tiny.folder if method == "itself" else draft_folder(tiny)
        flags |= {"speculative_method": "draft_model", "draft_model": str(folder)}
    return flags


def draft_folder(tiny: Any) -> Path:
    """TINY with noise on its weights; made once."""
    folder = tiny.folder.parent / f"{tiny.folder.name}-draft"
    if not folder.exists():
        model = copy.deepcopy(tiny.hf)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder)
        save_byte_tokenizer(folder)
    return folder


class Counts:
    """What an engine's steps have drafted, and how much of it was right. Put it into `engine.on_step`."""

    def __init__(self, engine: Any) -> None:
        self.num_steps = self.num_drafts = self.num_right = 0
        engine.on_step = self

    def __call__(self, scheduled: Any) -> None:
        self.num_steps += 1
        self.num_drafts += sum(scheduled.num_draft_tokens)
        self.num_right += sum(scheduled.num_accepted_tokens.values())
