"""From a step as the scheduler decided it to tensors, through the model, to tokens. No policy.

All tokens of a step are packed into one forward pass, chunks of prompts beside single tokens of decodes. Decodes come
first, so that the KV cache finds each kind in one piece. The choices of one request are sampled from the last row of
their common prompt. Prompts are scored here where a request asks for it
(`prompt_logprobs`). v0.7 verifies drafts here.
"""

import torch
from torch import Tensor

from common.llama import Model
from common.outputs import TokenLogprobs
from common.sampling import sample
from common.sampling_params import SamplingState
from common.scoring import score, unscored

from .kv_cache import KVCache
from .request import Request
from .scheduler import SchedulerOutput

Sampled = tuple[int, TokenLogprobs | None]


class ModelRunner:
    """Runs steps.

    Args:
        model: computes hidden states and logits.
        kv_cache: the pool that the block tables speak of.
        vocab_size: rows of the logits that may be sampled.
    """

    def __init__(self, model: Model, kv_cache: KVCache, vocab_size: int) -> None:
        self.model, self.kv_cache, self.vocab_size = model, kv_cache, vocab_size

    @torch.inference_mode()
    def run(self, scheduled: SchedulerOutput) -> dict[str, Sampled]:
        """Compute a step.

        Returns:
            The new token of each request whose known tokens are all computed now, by its id. A request in the middle
            of its prompt has none: the token after a chunk is known already.
        """
        if not scheduled.requests:
            return {}
        if scheduled.blocks_to_copy:
            self.kv_cache.copy_blocks(scheduled.blocks_to_copy)
        # Decodes first (False sorts before True), and those of one length side by side.
        num_tokens, tables = scheduled.num_scheduled_tokens, scheduled.block_tables
        order = sorted(range(len(tables)), key=lambda i: (num_tokens[i] > 1, len(tables[i])))
        requests, forks = [scheduled.requests[i] for i in order], [scheduled.forks[i] for i in order]
        query_lens = [num_tokens[i] for i in order]
        starts = [request.num_computed_tokens for request in requests]
        ends = [start + query_len for start, query_len in zip(starts, query_lens, strict=True)]
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []  # the last token of each request whose known tokens are complete
        complete: list[Request] = []
        row_of: list[int] = []  # for each of these, which of `rows` gives its next token
        prompt_rows: list[int] = []  # of tokens whose logits score the next token of the prompt
        to_score: list[tuple[SamplingState, int]] = []
        for request, its_forks, start, end in zip(requests, forks, starts, ends, strict=True):
            for position in unscored(request.sampling, start, end):
                prompt_rows.append(len(token_ids) + position - start)
                to_score.append((request.sampling, position))
            token_ids += request.token_ids(start, end)
            positions += range(start, end)
            if end == request.num_tokens:
                complete += [request, *its_forks]
                row_of += [len(rows)] * (1 + len(its_forks))
                rows.append(len(token_ids) - 1)
        device = self.model.device
        self.kv_cache.begin_step([tables[i] for i in order], query_lens, ends)
        hidden = self.model.forward(
            torch.tensor(token_ids, device=device),
            torch.tensor(positions, device=device),
            self.kv_cache,
            rows=torch.tensor(rows + prompt_rows, dtype=torch.long, device=device),
        )
        score(hidden[len(rows) :], to_score, self._logits)
        if not complete:
            return {}
        logits = self._logits(hidden[: len(rows)])
        logits = logits if len(rows) == len(row_of) else logits[row_of]  # a copy, where one row serves several
        output = sample(logits, [request.sampling for request in complete])
        results = zip(output.token_ids, output.logprobs, strict=True)
        return {request.request_id: result for request, result in zip(complete, results, strict=True)}

    def _logits(self, hidden: Tensor) -> Tensor:
        """Of the tokens that there are: the output head may be padded. `[R, hidden_size] -> [R, vocab_size]`."""
        return self.model.logits(hidden)[:, : self.vocab_size]
