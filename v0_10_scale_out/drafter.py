"""Who guesses the next tokens: an interface, and three drafters. A draft is checked by the model, never trusted.

    ngram         the sequence has been here before: what came after these last tokens the last time?
    early_exit    the same model's first layers, its norm and its head
    draft_model   a smaller Llama with the same vocabulary, whose keys and values lie in a pool of their own

All propose their most likely token. What a bad guess costs is time: whether a token is accepted is decided by the
model's own draw at its place (`model_runner.py`).
"""

from array import array
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from common.llama import Llama, Model

from .kv_cache import KVCache
from .packing import pack
from .request import Request
from .scheduler import SchedulerOutput


class Drafter(Protocol):
    """What the engine asks of a drafter."""

    def count(self, request: Request, most: int) -> int:
        """How many tokens it will draft for a request in the step that is being scheduled; `most`, or fewer."""
        ...

    def draft(self, scheduled: SchedulerOutput) -> None:
        """Put so many tokens into `draft_token_ids` of each request, as the step says, before it is computed."""
        ...


class NgramDrafter:
    """Looks the last tokens up in the request's own prompt and output, and proposes what followed them.

    Text that quotes, edits or repeats itself is full of such places. No model is asked.

    Args:
        ngram_min: fewest last tokens that must be found again.
        ngram_max: most that are looked for; the longest match wins, and of several the latest.
    """

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self.ngram_min, self.ngram_max = ngram_min, ngram_max

    def count(self, request: Request, most: int) -> int:
        """Looks already, as it may find nothing, and a place in the step would be kept for nothing."""
        request.draft_token_ids = self._propose(request.token_ids(0, request.num_tokens), most)
        return len(request.draft_token_ids)

    def draft(self, scheduled: SchedulerOutput) -> None:
        """`count` has done it; a step that turned out shorter takes the first ones."""
        for request, num_drafts in zip(scheduled.requests, scheduled.num_draft_tokens, strict=True):
            del request.draft_token_ids[num_drafts:]

    def _propose(self, token_ids: list[int], most: int) -> list[int]:
        # As bytes, which Python searches some ten times as fast as a list: this is done for each request in each step.
        packed = array("i", token_ids)
        numbers, size = packed.tobytes(), packed.itemsize
        for length in range(min(self.ngram_max, len(token_ids) - 1), self.ngram_min - 1, -1):
            pattern = numbers[-length * size :]
            # From the latest place back; the pattern's own place, at the end, has nothing behind it.
            start = numbers.rfind(pattern, 0, -size)
            while start % size and start >= 0:  # bytes of two tokens that look like one
                start = numbers.rfind(pattern, 0, start + len(pattern) - 1)
            if start >= 0:
                following = start // size + length
                return token_ids[following : following + most]
        return []


class EarlyExitDrafter:
    """The model itself, left after some layers.

    It shares the KV cache: its layers are the model's first ones, so that what the model has written there is what the
    drafter would have written, and what the drafter writes at the places of drafts is written again by the check.

    Args:
        model: the target.
        kv_cache: the target's.
        vocab_size: rows of the logits that may be sampled.
        exit_layer: how many layers are run.
    """

    def __init__(self, model: Llama, kv_cache: KVCache, vocab_size: int, exit_layer: int) -> None:
        self.model, self.kv_cache, self.vocab_size, self.exit_layer = model, kv_cache, vocab_size, exit_layer

    def count(self, request: Request, most: int) -> int:
        """Always as many as may be."""
        return most

    @torch.inference_mode()
    def draft(self, scheduled: SchedulerOutput) -> None:
        """One pass for each place, over all requests that have a draft there."""
        for request in scheduled.requests:
            request.draft_token_ids = []
        for place in range(max(scheduled.num_draft_tokens, default=0)):
            drafting = [i for i, num_drafts in enumerate(scheduled.num_draft_tokens) if num_drafts > place]
            _pass(scheduled, drafting, place, self.kv_cache, self._next_tokens)

    def _next_tokens(self, token_ids: Tensor, positions: Tensor) -> list[int]:
        hidden = self.model.forward(token_ids, positions, self.kv_cache, num_layers=self.exit_layer)
        return _most_likely(self.model, hidden, self.vocab_size)


class DraftModelDrafter:
    """Another model, which sees the same tokens in the same blocks of a pool of its own.

    Args:
        model: the smaller one.
        kv_cache: its own, with as many blocks as the target's.
        vocab_size: rows of the logits that may be sampled.
    """

    def __init__(self, model: Model, kv_cache: KVCache, vocab_size: int) -> None:
        self.model, self.kv_cache, self.vocab_size = model, kv_cache, vocab_size

    def count(self, request: Request, most: int) -> int:
        """Always as many as may be."""
        return most

    @torch.inference_mode()
    def draft(self, scheduled: SchedulerOutput) -> None:
        """A pass over all tokens that the step knows, then one for each draft.

        The first one computes prompts, too, so that blocks that are found later hold the KV of both models. The last
        one only stores the last draft's KV, which is needed if all are accepted.
        """
        for request in scheduled.requests:
            request.draft_token_ids = []
        if scheduled.blocks_to_copy:
            self.kv_cache.copy_blocks(scheduled.blocks_to_copy)
        if scheduled.requests:
            self._compute_known(scheduled)
        for place in range(1, max(scheduled.num_draft_tokens, default=0) + 1):
            drafting = [i for i, num_drafts in enumerate(scheduled.num_draft_tokens) if num_drafts >= place]
            _pass(scheduled, drafting, place, self.kv_cache, self._next_tokens)
        for request, num_drafts in zip(scheduled.requests, scheduled.num_draft_tokens, strict=True):
            del request.draft_token_ids[num_drafts:]

    def _compute_known(self, scheduled: SchedulerOutput) -> None:
        batch = pack(scheduled, self.model.device, with_drafts=False)
        _begin_pass(self.kv_cache, batch.block_tables, batch.query_lens, batch.ends)
        last_rows = torch.tensor(batch.query_lens, device=self.model.device).cumsum(0) - 1
        drafting = [i for i, num_drafts in enumerate(batch.num_draft_tokens) if num_drafts]
        hidden = self._forward(batch.token_ids, batch.positions, last_rows[drafting])
        if drafting:
            for i, token_id in zip(drafting, _most_likely(self.model, hidden, self.vocab_size), strict=True):
                batch.requests[i].draft_token_ids.append(token_id)

    def _next_tokens(self, token_ids: Tensor, positions: Tensor) -> list[int]:
        return _most_likely(self.model, self._forward(token_ids, positions), self.vocab_size)

    def _forward(self, token_ids: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        # A prompt may hold ids of the target's rows to spare; this model may have fewer of them.
        token_ids = token_ids.clamp(max=self.model.config.vocab_size - 1)
        return self.model.forward(token_ids, positions, self.kv_cache, rows=rows)


def _most_likely(model: Model, hidden: Tensor, vocab_size: int) -> list[int]:
    """One token for each row: `[R, hidden_size]`."""
    return model.logits(hidden)[:, :vocab_size].argmax(dim=-1).tolist()


def _pass(
    scheduled: SchedulerOutput,
    drafting: list[int],
    place: int,
    kv_cache: KVCache,
    next_tokens: Callable[[Tensor, Tensor], list[int]],
) -> None:
    """Compute one token of each of these requests, `place` behind its last known one, and append what follows."""
    tables = scheduled.block_tables
    drafting = sorted(drafting, key=lambda i: scheduled.requests[i].num_tokens)
    requests = [scheduled.requests[i] for i in drafting]
    token_ids = [
        request.draft_token_ids[place - 1]
        if place
        else request.token_ids(request.num_tokens - 1, request.num_tokens)[0]
        for request in requests
    ]
    ends = [request.num_tokens + place for request in requests]
    _begin_pass(kv_cache, [tables[i] for i in drafting], [1] * len(requests), ends)
    device = kv_cache.kv.device
    positions = torch.tensor(ends, device=device) - 1
    for request, token_id in zip(requests, next_tokens(torch.tensor(token_ids, device=device), positions), strict=True):
        request.draft_token_ids.append(token_id)


def _begin_pass(kv_cache: KVCache, tables: list[list[int]], query_lens: list[int], ends: list[int]) -> None:
    """Begin a pass that leaves out the blocks reserved for later drafts: what a former owner left there may be NaN."""
    written = [table[: -(-end // kv_cache.block_size)] for table, end in zip(tables, ends, strict=True)]
    kv_cache.begin_step(written, query_lens, ends)
