"""A request on its way through the engine: what is known of it, and how far it has come. Torch-free.

One field drives the scheduler: `num_computed_tokens`, the tokens whose KV is in the cache. What is left of a request is
`num_tokens - num_computed_tokens`: the whole prompt at first, one token in each decode step, and prompt and output
again after a preemption. Nothing else tells prefill from decode. It starts above zero where the prefix cache holds the
first tokens already.
"""

import enum
from dataclasses import dataclass, field

from common.sampling_params import FinishReason, SamplingState


class RequestStatus(enum.Enum):
    """Where a request is. A preempted one is `WAITING` again, at the head of the queue."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be generated. A caller's request with `n > 1` becomes `n` of these.

    `sampling` holds its tokens: the lists of the prompt and of the output, which grows. A preemption takes neither, so
    that the request goes on where it was, with the same tokens and the same random numbers.

    `forks` are the other choices of the same caller's request. They wait for this one's prompt: once it is computed,
    they run, too, with the same blocks. `num_cached_tokens` of it were in the prefix cache, and not computed.

    `draft_token_ids` are guesses of a step at what comes next. None is a token of the request before it is checked.
    `num_draft_tokens` and `num_accepted_tokens` count them over all steps.
    """

    request_id: str
    sampling: SamplingState
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    finish: FinishReason | None = None
    cache_salt: str | None = None
    num_cached_tokens: int = 0
    forks: list["Request"] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt alone."""
        return len(self.sampling.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.num_prompt_tokens + len(self.sampling.output_token_ids)

    @property
    def num_reusable_tokens(self) -> int:
        """How many of its first tokens may come from the prefix cache: not the last, whose logits give the next one.

        Where the prompt is scored, every row is needed that has no score yet.
        """
        scores = self.sampling.prompt_logprobs
        is_scored = scores is None or len(scores) == self.num_prompt_tokens - 1
        return self.num_tokens - 1 if is_scored else len(scores or ())

    def token_ids(self, start: int, end: int) -> list[int]:
        """The tokens at positions `start` to `end - 1`, of prompt and output as one sequence."""
        prompt, output = self.sampling.prompt_token_ids, self.sampling.output_token_ids
        if start >= len(prompt):
            return output[start - len(prompt) : end - len(prompt)]
        return (prompt[start:end] + output[: max(0, end - len(prompt))]) if end > len(prompt) else prompt[start:end]
