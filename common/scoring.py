"""Prompt log-probabilities: what the model would have thought of the prompt's own tokens. From v0.4 on.

The row of logits that belongs to one token scores the next. Serving needs one row of a whole prompt, its last; whoever
wants the prompt scored needs them all, and 4,000 rows of 49,152 floats are 786 MB. So the rows are computed a slice at
a time, and what is kept of each is a few numbers.

    prompt      the   sky   is   blue
    row          0     1     2     3
    scores      sky   is   blue   (the first token of the answer: the sampler's row)
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from common.sampling import token_logprobs
from common.sampling_params import SamplingState

MOST_ROWS = 64  # of logits that are held at once


def unscored(state: SamplingState, start: int, end: int) -> range:
    """Of the positions `start` to `end - 1`, those whose rows score a token of the prompt that has no score yet.

    A prompt that is computed again, after a preemption or a failed step, keeps the scores that it has.
    """
    if state.prompt_logprobs is None:
        return range(0)
    return range(max(start, len(state.prompt_logprobs)), min(end, len(state.prompt_token_ids) - 1))


def score(hidden: Tensor, wanted: Sequence[tuple[SamplingState, int]], logits: Callable[[Tensor], Tensor]) -> None:
    """Add scores to requests' `prompt_logprobs`.

    Args:
        hidden: `[R, hidden_size]`.
        wanted: whose each row is, and its position; those of one request in order.
        logits: `[r, hidden_size] -> [r, vocab_size]`, asked for `MOST_ROWS` rows at most.
    """
    for start in range(0, len(wanted), MOST_ROWS):
        rows = wanted[start : start + MOST_ROWS]
        token_ids = [state.prompt_token_ids[position + 1] for state, position in rows]
        nums = [state.params.prompt_logprobs or 0 for state, _ in rows]
        entries = token_logprobs(logits(hidden[start : start + MOST_ROWS]), token_ids, nums)
        for (state, _), entry in zip(rows, entries, strict=True):
            assert state.prompt_logprobs is not None
            state.prompt_logprobs.append(entry)
