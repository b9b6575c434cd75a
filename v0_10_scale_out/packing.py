"""A step's tokens as tensors, the requests one after the other, in the order in which the KV cache wants them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .request import Request
from .scheduler import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of a step, those with one token first, and their packed tokens.

    `starts` and `ends` are positions: request `i` computes its tokens from `starts[i]` up to `ends[i]`, of which the
    last `num_draft_tokens[i]` are drafts.
    """

    requests: list[Request]
    forks: list[list[Request]]
    block_tables: list[list[int]]
    num_draft_tokens: list[int]
    starts: list[int]
    ends: list[int]
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]

    @property
    def query_lens(self) -> list[int]:
        """How many tokens of each request are computed."""
        return [end - start for start, end in zip(self.starts, self.ends, strict=True)]


def pack(scheduled: SchedulerOutput, device: torch.device, *, with_drafts: bool) -> Batch:
    """A step with the drafts behind each request's known tokens, or without them."""
    both = zip(scheduled.num_scheduled_tokens, scheduled.num_draft_tokens, strict=True)
    lens = [num_tokens if with_drafts else num_tokens - num_drafts for num_tokens, num_drafts in both]
    # Decodes first (False sorts before True), and those of one length side by side.
    tables = scheduled.block_tables
    ends = [request.num_computed_tokens + num for request, num in zip(scheduled.requests, lens, strict=True)]
    order = sorted(range(len(tables)), key=lambda i: (lens[i] > 1, ends[i]))
    requests = [scheduled.requests[i] for i in order]
    starts = [request.num_computed_tokens for request in requests]
    ends = [ends[i] for i in order]
    token_ids: list[int] = []
    positions: list[int] = []
    for request, start, end in zip(requests, starts, ends, strict=True):
        token_ids += request.token_ids(start, min(end, request.num_tokens))
        token_ids += request.draft_token_ids[: max(0, end - request.num_tokens)]
        positions += range(start, end)
    return Batch(
        requests,
        [scheduled.forks[i] for i in order],
        [tables[i] for i in order],
        [scheduled.num_draft_tokens[i] for i in order],
        starts,
        ends,
        torch.tensor(token_ids, device=device),
        torch.tensor(positions, device=device),
    )
