"""From tokens to what callers see: text, stop strings, and `n` choices as one request. Knows nothing of blocks.

A caller's request with `n` choices is `n` requests to the scheduler, its children. Each has a detokenizer here; what
they add in a step goes out as one `RequestOutput` of deltas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.detokenizer import Detokenizer
from common.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
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
    aborted: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # until an output has taken them along
    num_cached_tokens: int = 0


class Child(NamedTuple):
    """One of its choices."""

    parent: Parent
    choice: int  # its index among them
    request: Request
    detokenizer: Detokenizer


Snapshot = list[tuple[Child, int]]  # children, and how many output tokens each of them had


class OutputProcessor:
    """Turns a step's tokens into outputs.

    Args:
        tokenizer: the model's.
        finish_requests: the scheduler's; called at once for a request whose text has met a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, finish_requests: Callable[[list[str]], None]) -> None:
        self.tokenizer, self.finish_requests = tokenizer, finish_requests
        self.parents: dict[str, Parent] = {}
        self._children: dict[str, Child] = {}  # in the order of arrival

    def add(self, parent: Parent, children: list[Request]) -> None:
        """Expect tokens for these children; a child's place in the list is the index of its choice."""
        parent.unfinished.update(child.request_id for child in children)
        self.parents[parent.request_id] = parent
        for index, child in enumerate(children):
            self._children[child.request_id] = self._child(parent, index, child)

    def children(self) -> list[Child]:
        """Those that have not ended, in the order of arrival."""
        return list(self._children.values())

    def requests(self) -> list[Request]:
        """Their requests."""
        return [child.request for child in self.children()]

    def process(
        self, scheduled: SchedulerOutput, sampled: Mapping[str, Sequence[tuple[int, TokenLogprobs | None]]]
    ) -> list[RequestOutput]:
        """The outputs of a step: one for each caller's request that got a token, with the deltas of its choices."""
        deltas: dict[str, list[CompletionOutput]] = {}
        for request in scheduled.requests_and_forks:
            if request.request_id not in sampled or request.request_id not in self._children:  # aborted meanwhile
                continue
            parent, index, _, detokenizer = self._children[request.request_id]
            results = sampled[request.request_id]
            if request.sampling.prompt_logprobs is not None and len(request.sampling.output_token_ids) == 1:
                scores = [entry.with_text(self.tokenizer.token_text) for entry in request.sampling.prompt_logprobs]
                parent.prompt_logprobs = [None, *scores]
            if index == 0:  # the one that computed the prompt
                parent.num_cached_tokens = request.num_cached_tokens
            delta = CompletionOutput(index)
            for number, (token_id, logprobs) in enumerate(results, 1):
                delta.extend(self._delta(request, index, token_id, logprobs, detokenizer, number == len(results)))
                if detokenizer.stop_reason is not None:  # what was accepted behind a stop string is not shown
                    self.finish_requests([request.request_id])
                    break
            deltas.setdefault(parent.request_id, []).append(delta)
            if delta.finish_reason is not None:
                parent.metrics.num_preemptions += request.num_preemptions
                parent.metrics.num_draft_tokens += request.num_draft_tokens
                parent.metrics.num_accepted_tokens += request.num_accepted_tokens
                parent.unfinished.remove(request.request_id)
                del self._children[request.request_id]
        return [self._output(self.parents[request_id], outputs) for request_id, outputs in deltas.items()]

    def _delta(
        self,
        request: Request,
        index: int,
        token_id: int,
        logprobs: TokenLogprobs | None,
        detokenizer: Detokenizer,
        is_last: bool,
    ) -> CompletionOutput:
        """What one token adds to a choice."""
        token_ids = [token_id]
        if request.sampling.params.max_tokens == 0:  # the prompt was to be scored, no more
            token_ids, logprobs = [], None
        text, finish = detokenizer.step(token_ids, request.finish if is_last else None)
        delta = CompletionOutput(index, text, token_ids)
        delta.finish_reason, delta.stop_reason = finish or (None, None)
        delta.add_logprobs(logprobs, self.tokenizer.token_text)
        return delta

    def parent_id(self, child_id: str) -> str:
        """The caller's request that this one, which has not ended, is a choice of."""
        return self._children[child_id][0].request_id

    def abort(self, request_id: str) -> list[str]:
        """Forget a caller's request; returns the children that still ran. An id that is not here has none."""
        parent = self.parents.get(request_id)
        children = sorted(parent.unfinished) if parent is not None else []
        for child in children:
            self._children.pop(child, None)  # it may be gone, where an abort was cut short
        if parent is not None:
            parent.aborted = True
            self.parents.pop(request_id, None)
        return children

    def snapshot(self, requests: list[Request]) -> Snapshot:
        """What `rewind` needs to know of a step's requests, before the step's tokens are taken in."""
        return [(self._children[r.request_id], len(r.sampling.output_token_ids)) for r in requests]

    def rewind(self, snapshot: Snapshot) -> None:
        """Undo a step that was cut short at any line: nothing of it has been told to anybody."""
        snapshot = [entry for entry in snapshot if not entry[0].parent.aborted]  # from within the step
        for (parent, _, request, _), num_tokens in snapshot:
            del request.sampling.output_token_ids[num_tokens:]
            request.finish = None
            self.parents[parent.request_id] = parent
            parent.unfinished.add(request.request_id)
        # A step's requests have arrived before all others. Their detokenizers may have stopped half-way.
        again = {child.request.request_id: self._child(*child[:3]) for child, _ in snapshot}
        self._children = again | {id_: child for id_, child in self._children.items() if id_ not in again}

    def _child(self, parent: Parent, index: int, request: Request) -> Child:
        detokenizer = Detokenizer(self.tokenizer, parent.prompt_token_ids, request.sampling.params)
        detokenizer.append(request.sampling.output_token_ids)  # none, unless a step is undone
        return Child(parent, index, request, detokenizer)

    def _output(self, parent: Parent, outputs: list[CompletionOutput]) -> RequestOutput:
        parent.metrics.record_step()
        finished = not parent.unfinished
        if finished:
            del self.parents[parent.request_id]
        scores, parent.prompt_logprobs = parent.prompt_logprobs, None
        return RequestOutput(
            parent.request_id,
            parent.prompt,
            parent.prompt_token_ids,
            outputs,
            finished,
            parent.metrics,
            scores,
            parent.num_cached_tokens,
        )
