"""What a caller gets back: vLLM's shapes, without its tensors. Torch-free."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class Logprob:
    """One candidate for one position; values are the log-softmax of the model's own logits.

    Temperature, filters, penalties and biases do not change it (vLLM's default, too). `rank` counts from 1.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class TokenLogprobs:
    """What is known of one position: the sampled token (or the prompt's) first, then the most likely ones in order."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]

    def with_text(self, token_text: Callable[[int], str]) -> dict[int, Logprob]:
        """vLLM's form, the sampled token first; `token_text` is the tokenizer's."""
        return {
            token_id: Logprob(logprob, rank, token_text(token_id))
            for token_id, logprob, rank in zip(self.token_ids, self.logprobs, self.ranks, strict=True)
        }


@dataclass(slots=True)
class RequestMetrics:
    """Clock readings of one request, in seconds of `time.perf_counter()`, and the memory its KV took, in bytes.

    The bytes are told by v0.1 and v0.2, which serve one request at a time; from v0.3 on they are 0.
    """

    arrival_time: float
    scheduled_time: float = 0.0  # when its first step began; told by the server's metrics, 0 without them
    first_token_time: float = 0.0
    finished_time: float = 0.0
    kv_reserved_bytes: int = 0
    kv_used_bytes: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # from v0.7 on: tokens that were guessed, and how many of them were right
    num_accepted_tokens: int = 0

    def record_step(self, kv_reserved_bytes: int = 0, kv_used_bytes: int = 0) -> None:
        """Read the clock: a step has just given the request a token, its first or its last so far."""
        self.finished_time = time.perf_counter()
        self.first_token_time = self.first_token_time or self.finished_time
        self.kv_reserved_bytes, self.kv_used_bytes = kv_reserved_bytes, kv_used_bytes


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers to a prompt.

    `token_ids` holds every generated token, the end token included; `text` leaves it out unless
    `include_stop_str_in_output`. `finish_reason` is `None` while the request runs, then `"stop"` or `"length"`;
    `stop_reason` is the stop string or the token id that ended it, `None` for the model's first end token.
    `logprobs` holds one dict per token, from candidate id to `Logprob`, with the sampled token always in it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add_logprobs(self, entry: TokenLogprobs | None, token_text: Callable[[int], str]) -> None:
        """Put the log-probabilities of this choice's one token in, if there are any."""
        if entry is not None:
            self.logprobs, self.cumulative_logprob = [entry.with_text(token_text)], entry.logprobs[0]

    def extend(self, delta: "CompletionOutput") -> None:
        """Append what a later step added to this choice."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + (delta.cumulative_logprob or 0.0)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """What is known of one request: its prompt, and one `CompletionOutput` for each of the `n` choices.

    `prompt` is `None` where the caller gave token ids. `.stream` yields deltas (each output holds only what the step
    added), `.generate` and `.chat` return whole answers. `prompt_logprobs` has one entry for each token of the prompt,
    `None` for the first, which nothing comes before; among deltas, the first output alone has it. `num_cached_tokens`
    says how much of the prompt was in the prefix cache (from v0.6 on).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    def extend(self, delta: "RequestOutput") -> None:
        """Append what a later step added; a choice that is new here is taken over."""
        choices = {choice.index: choice for choice in self.outputs}
        for choice in delta.outputs:
            choices.setdefault(choice.index, CompletionOutput(choice.index)).extend(choice)
        self.outputs = [choices[index] for index in sorted(choices)]
        self.finished = delta.finished
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


class Engine(Protocol):
    """What steps, and tells of all requests at once (from v0.3 on)."""

    def step(self) -> list[RequestOutput]:
        """The deltas of one step."""
        ...

    def abort_request(self, request_id: str) -> None:
        """End a request; one that has ended already, or never was, is no error."""
        ...


class OutputQueues(dict[str, deque[RequestOutput]]):
    """Of each open request: what its reader has not taken yet. Any reader may step, and it brings something for all.

    An interrupt (Ctrl-C) may come at any line of it: what is another reader's is then neither lost nor given twice.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._undelivered: deque[RequestOutput] = deque()
        self.dropped: list[str] = []  # requests whose readers have gone without a word

    def open(self, request_id: str) -> None:
        """Expect outputs of a request that is given to the engine next."""
        self[request_id] = deque()

    def step(self) -> None:
        """Step the engine, and put what each request gets into its queue."""
        while self.dropped:
            self.leave(self.dropped[:1])
            del self.dropped[0]
        self._undelivered.extend(self._engine.step())
        while self._undelivered:  # taken and put in one line, between whose parts there is no interrupt
            self._queue(self._undelivered[0].request_id).append(self._undelivered.popleft())

    def take(self, request_id: str) -> Iterator[RequestOutput]:
        """What a request's queue holds; the request is no longer open once its last output is taken."""
        outputs = self._queue(request_id)
        while outputs:
            output = outputs.popleft()
            if output.finished:
                del self[request_id]
            yield output

    def read(self, request_id: str) -> Iterator[RequestOutput]:
        """All outputs of a request, stepping for those that are not there yet."""
        while request_id in self:
            yield from self.take(request_id)
            if request_id in self:
                self.step()

    def leave(self, request_ids: list[str]) -> None:
        """Forget requests, and abort those that have not ended: their reader has left, or a step has failed."""
        for request_id in request_ids:
            if request_id in self:
                self._engine.abort_request(request_id)
                del self[request_id]

    def _queue(self, request_id: str) -> deque[RequestOutput]:
        """Of a request that somebody has given to the engine himself, or left: one that nobody reads."""
        return self.get(request_id, deque())


class OutputStream:
    """A request's deltas. However it is left, closed, dropped, by an error or at its end, the request is left, too.

    A generator alone would not do: one that was never started does not reach its `finally`.
    """

    def __init__(self, request_id: str, queues: OutputQueues) -> None:
        self._request_id, self._queues, self._outputs = request_id, queues, queues.read(request_id)

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        try:
            return next(self._outputs)
        except BaseException:  # the end, too
            self.close()
            raise

    def close(self) -> None:
        """Leave the stream; what has not ended is aborted."""
        self._queues.leave([self._request_id])
        self._outputs = iter(())

    def __del__(self) -> None:
        # In the middle of anything, as garbage is collected at any moment: the next step leaves it.
        if hasattr(self, "_queues"):  # not if it was interrupted before it had any
            self._queues.dropped.append(self._request_id)
