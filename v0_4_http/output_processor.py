"""From tokens to what callers see: text, stop strings, and `n` choices as one request. Knows nothing of blocks.

A caller's request with `n` choices is `n` requests to the scheduler, its children. Each has a detokenizer here; what
they add in a step goes out as one `RequestOutput` of deltas.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.detokenizer import Detokenizer
from common.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from common.tokenizer import Tokenizer

from .request import Request
from .scheduler import SchedulerOutput


@dataclass(slots=True)
class Parent:
    """A caller's request: what goes into its outputs, and which of its children still run."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    unfinished: set[str]


class OutputProcessor:
    """Turns a step's tokens into outputs.

    Args:
        tokenizer: the model's.
        finish_requests: the scheduler's; called at once for a request whose text has met a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, finish_requests: Callable[[list[str]], None]) -> None:
        self.tokenizer, self.finish_requests = tokenizer, finish_requests
        self.parents: dict[str, Parent] = {}
        self._children: dict[str, tuple[Parent, int, Detokenizer]] = {}

    def add(self, parent: Parent, children: list[Request]) -> None:
        """Expect tokens for these children; a child's place in the list is the index of its choice."""
        self.parents[parent.request_id] = parent
        for index, child in enumerate(children):
            detokenizer = Detokenizer(self.tokenizer, parent.prompt_token_ids, child.sampling.params)
            self._children[child.request_id] = (parent, index, detokenizer)
            parent.unfinished.add(child.request_id)

    def process(
        self, scheduled: SchedulerOutput, sampled: Mapping[str, tuple[int, TokenLogprobs | None]]
    ) -> list[RequestOutput]:
        """The outputs of a step: one for each caller's request that got a token, with the deltas of its choices."""
        deltas: dict[str, list[CompletionOutput]] = {}
        for request in scheduled.requests:
            if request.request_id not in sampled or request.request_id not in self._children:  # aborted meanwhile
                continue
            parent, index, detokenizer = self._children[request.request_id]
            token_id, logprobs = sampled[request.request_id]
            text, finish = detokenizer.step([token_id], request.finish)
            if detokenizer.stop_reason is not None:
                self.finish_requests([request.request_id])
            delta = CompletionOutput(index, text, [token_id])
            delta.finish_reason, delta.stop_reason = finish or (None, None)
            delta.add_logprobs(logprobs, self.tokenizer.token_text)
            deltas.setdefault(parent.request_id, []).append(delta)
            if finish is not None:
                parent.metrics.num_preemptions += request.num_preemptions
                parent.unfinished.remove(request.request_id)
                del self._children[request.request_id]
        return [self._output(self.parents[request_id], outputs) for request_id, outputs in deltas.items()]

    def parent_id(self, child_id: str) -> str:
        """The caller's request that this one, which has not ended, is a choice of."""
        return self._children[child_id][0].request_id

    def abort(self, request_id: str) -> list[str]:
        """Forget a caller's request; returns the children that still ran. An id that is not here has none."""
        parent = self.parents.pop(request_id, None)
        children = sorted(parent.unfinished) if parent is not None else []
        for child in children:
            del self._children[child]
        return children

    def _output(self, parent: Parent, outputs: list[CompletionOutput]) -> RequestOutput:
        parent.metrics.record_step()
        finished = not parent.unfinished
        if finished:
            del self.parents[parent.request_id]
        return RequestOutput(
            parent.request_id, parent.prompt, parent.prompt_token_ids, outputs, finished, parent.metrics
        )
