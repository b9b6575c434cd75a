"""From a step as the scheduler decided it to tensors, through the model, to tokens. No policy.

All tokens of a step are packed into one forward pass (`packing.py`), chunks of prompts beside single tokens of decodes.
The choices of one request are sampled from the last row of their common prompt. Prompts are scored here where a request
asks for it (`prompt_logprobs`).

Drafts are checked in the same pass. A request with the known token `x` and the drafts `a b c` computes four rows:

    row           x    a    b    c
    draws         a    b    d    -       the token that plain decoding would draw there: the next one's place and number
    drafts        a    b    c            a and b are what was drawn, c is not: `a b d` are the new tokens

Each row draws from the model's own distribution, with the history that it would have. So the tokens are those of plain
decoding, and a draft only decides how many of them come out of one step.
"""

from dataclasses import replace

import torch
from torch import Tensor

from common.llama import Model
from common.outputs import TokenLogprobs
from common.sampling import sample
from common.sampling_params import SamplingState
from common.scoring import score, unscored

from .drafter import Drafter
from .kv_cache import KVCache
from .packing import pack
from .request import Request
from .scheduler import SchedulerOutput

Sampled = list[tuple[int, TokenLogprobs | None]]


class ModelRunner:
    """Runs steps.

    Args:
        model: computes hidden states and logits.
        kv_cache: the pool that the block tables speak of.
        vocab_size: rows of the logits that may be sampled.
        drafter: fills in the drafts of a step, if there are any.
    """

    def __init__(self, model: Model, kv_cache: KVCache, vocab_size: int, drafter: Drafter | None = None) -> None:
        self.model, self.kv_cache, self.vocab_size, self.drafter = model, kv_cache, vocab_size, drafter

    @torch.inference_mode()
    def run(self, scheduled: SchedulerOutput) -> dict[str, Sampled]:
        """Compute a step.

        Returns:
            The new tokens of each request whose known tokens are all computed now, by its id: the drafts that were
            right, and one more. A request in the middle of its prompt has none: the token after a chunk is known
            already.
        """
        if not scheduled.requests:
            return {}
        if scheduled.blocks_to_copy:
            self.kv_cache.copy_blocks(scheduled.blocks_to_copy)
        if self.drafter is not None:
            self.drafter.draft(scheduled)
        batch = pack(scheduled, self.model.device, with_drafts=True)
        rows: list[int] = []  # of each request whose known tokens are complete: the last one, and its drafts
        complete: list[Request] = []
        rows_of: list[list[int]] = []  # for each of these, which of `rows` are its own
        prompt_rows: list[int] = []  # of tokens whose logits score the next token of the prompt
        to_score: list[tuple[SamplingState, int]] = []
        first_row = 0
        for request, forks, num_drafts, start, end in zip(
            batch.requests, batch.forks, batch.num_draft_tokens, batch.starts, batch.ends, strict=True
        ):
            for position in unscored(request.sampling, start, end):
                prompt_rows.append(first_row + position - start)
                to_score.append((request.sampling, position))
            first_row += end - start
            if end - num_drafts == request.num_tokens:
                own = list(range(len(rows), len(rows) + num_drafts + 1))
                complete += [request, *forks]
                rows_of += [own] * (1 + len(forks))
                rows += range(first_row - num_drafts - 1, first_row)
        self.kv_cache.begin_step(batch.block_tables, batch.query_lens, batch.ends)
        hidden = self.model.forward(
            batch.token_ids,
            batch.positions,
            self.kv_cache,
            rows=torch.tensor(rows + prompt_rows, dtype=torch.long, device=self.model.device),
        )
        score(hidden[len(rows) :], to_score, self._logits)
        return self._sample(self._logits(hidden[: len(rows)]), complete, rows_of) if complete else {}

    def _sample(self, logits: Tensor, requests: list[Request], rows_of: list[list[int]]) -> dict[str, Sampled]:
        """Draw a token at each row of each request, and keep them up to the first that its draft is not."""
        order = [row for rows in rows_of for row in rows]
        if order != list(range(len(logits))):  # a copy, where one row serves several
            logits = logits[order]
        states = [
            _with_output(request.sampling, request.draft_token_ids[:num_accepted])
            for request, rows in zip(requests, rows_of, strict=True)
            for num_accepted in range(len(rows))
        ]
        output = sample(logits, states)
        drawn = iter(zip(output.token_ids, output.logprobs, strict=True))
        sampled: dict[str, Sampled] = {}
        for request, rows in zip(requests, rows_of, strict=True):
            results = [next(drawn) for _ in rows]
            drafts = request.draft_token_ids[: len(rows) - 1]
            num_accepted = next((i for i, draft in enumerate(drafts) if draft != results[i][0]), len(drafts))
            sampled[request.request_id] = results[: num_accepted + 1]
        return sampled

    def _logits(self, hidden: Tensor) -> Tensor:
        """Of the tokens that there are: the output head may be padded. `[R, hidden_size] -> [R, vocab_size]`."""
        return self.model.logits(hidden)[:, : self.vocab_size]


def _with_output(state: SamplingState, accepted: list[int]) -> SamplingState:
    """A request as it would be, had these tokens been generated; itself, without any."""
    return replace(state, output_token_ids=[*state.output_token_ids, *accepted]) if accepted else state
