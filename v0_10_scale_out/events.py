"""What happens in an engine, said as it happens: typed events, and the bus that carries them. Torch-free, no asyncio.

    block manager ─┐
    scheduler ─────┼─▶ EventBus.emit ─▶ kept until the step has ended ─▶ every listener, all of a step in one call
    engine ────────┘

A step that is cut short has not happened, and neither have its events: the bus forgets them, and tells its listeners
that what they know may be wrong (`Listener.on_reset`). They ask for the whole state then (`snapshot.py`).

Whoever knows the state at one moment and folds all events after it into it knows the state at any later moment. That is
what the page does, live or from a recording. A request's table grows at its end (`BlockAllocated`, `BlockShared`) and
loses the block that `BlockFreed` names.

With nobody listening no event is made: `emit` is given the class and its fields.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Protocol

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened; `type` is its name in messages."""

    type: ClassVar[str]


# Requests. A caller's request with `n` choices is `n` of these, `parent/0` to `parent/n-1`.


@dataclass(frozen=True, slots=True)
class RequestQueued(Event):
    """A request waits for the first time.

    `prompt` is the beginning of its text, `None` where it came as token ids; `parent_id` the caller's request. The
    choices after the first wait within it for their common prompt (`RequestForked`), and not in the queue.
    """

    type: ClassVar[str] = "request_queued"
    request_id: str
    parent_id: str
    num_prompt_tokens: int
    max_tokens: int | None
    prompt: str | None


@dataclass(frozen=True, slots=True)
class RequestAdmitted(Event):
    """A request begins to run, for the first time or again; its first tokens were in the prefix cache."""

    type: ClassVar[str] = "request_admitted"
    request_id: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestForked(Event):
    """A choice begins to run with the blocks of another, which has computed their common prompt."""

    type: ClassVar[str] = "request_forked"
    request_id: str
    from_request_id: str


@dataclass(frozen=True, slots=True)
class PrefillChunk(Event):
    """A step has computed `num_new_tokens` of a prompt, or of all tokens of a request that was preempted.

    `num_computed_tokens` of its `num_tokens` are done now. `num_cached_tokens` is how many more this step found in the
    prefix cache.
    """

    type: ClassVar[str] = "prefill_chunk"
    request_id: str
    num_new_tokens: int
    num_computed_tokens: int
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken(Event):
    """The first tokens of a request, and the text that may be shown of them: `""` while a character is incomplete.

    `seconds` is the time to first token.
    """

    type: ClassVar[str] = "first_token"
    request_id: str
    token_ids: tuple[int, ...]
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Decode(Event):
    """More tokens of a request: one, or with accepted drafts several."""

    type: ClassVar[str] = "decode"
    request_id: str
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class SpeculativeRound(Event):
    """A request's drafts were checked: so many were right, and the room of the rest was taken back."""

    type: ClassVar[str] = "speculative_round"
    request_id: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_rolled_back: int


@dataclass(frozen=True, slots=True)
class RequestPreempted(Event):
    """A request has lost its blocks, to make room for `for_request_id`, and waits at the head of the queue.

    The two are the same where nobody newer ran. `num_tokens` that were computed have to be computed again.
    """

    type: ClassVar[str] = "request_preempted"
    request_id: str
    for_request_id: str
    num_blocks: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    """A request has its whole answer: `reason` is `"stop"` or `"length"`, `stop_reason` what stopped it."""

    type: ClassVar[str] = "request_finished"
    request_id: str
    reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestAborted(Event):
    """A request has ended without its answer: its caller has left, or the model failed on it."""

    type: ClassVar[str] = "request_aborted"
    request_id: str


# Blocks.


@dataclass(frozen=True, slots=True)
class BlockAllocated(Event):
    """A free block is a request's, which owns it alone."""

    type: ClassVar[str] = "block_allocated"
    block: int
    request_id: str


@dataclass(frozen=True, slots=True)
class BlockShared(Event):
    """A block that holds what a request needs is also the request's; `ref_count` requests own it now."""

    type: ClassVar[str] = "block_shared"
    block: int
    request_id: str
    ref_count: int


@dataclass(frozen=True, slots=True)
class BlockCopied(Event):
    """A request writes into a copy, `target`, in place of `source`, which others own, too."""

    type: ClassVar[str] = "block_copied"
    source: int
    target: int
    request_id: str


@dataclass(frozen=True, slots=True)
class BlockCached(Event):
    """A block is full and computed: others can find it, until it is evicted, even if nobody owns it."""

    type: ClassVar[str] = "block_cached"
    block: int


@dataclass(frozen=True, slots=True)
class BlockEvicted(Event):
    """A cached block that nobody owned is needed for something else: it can't be found any more."""

    type: ClassVar[str] = "block_evicted"
    block: int


@dataclass(frozen=True, slots=True)
class BlockFreed(Event):
    """A request doesn't own a block any more; `ref_count` others still do."""

    type: ClassVar[str] = "block_freed"
    block: int
    request_id: str
    ref_count: int


@dataclass(frozen=True, slots=True)
class CacheReset(Event):
    """Nothing that has been computed so far can be found any more; whoever owns a block keeps it."""

    type: ClassVar[str] = "cache_reset"


# Steps.


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """What one request computes in a step: of `num_tokens`, the last `num_draft_tokens` are guesses."""

    request_id: str
    num_tokens: int
    is_decode: bool
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Step(Event):
    """A step has ended; the last event of it.

    `refused` names the request at the head of the queue, if there is one that was not admitted, and
    `refused_reason` says why: a value of `scheduler.Refusal`. The last four are seconds.
    """

    type: ClassVar[str] = "step"
    number: int
    token_budget: int
    scheduled: tuple[ScheduledTokens, ...]
    preempted: tuple[str, ...]
    refused: str | None
    refused_reason: str | None
    num_running: int
    num_waiting: int
    num_free_blocks: int
    schedule_seconds: float
    run_seconds: float
    update_seconds: float
    output_seconds: float


@dataclass(frozen=True, slots=True)
class PaceChanged(Event):
    """The engine was told how to step: not at all, or with a pause of `delay` seconds after each step."""

    type: ClassVar[str] = "pace_changed"
    paused: bool
    delay: float


TimedEvents = Sequence[tuple[float, Event]]  # each with its moment, by `time.perf_counter()`


class Listener(Protocol):
    """Who is told. Called in the engine's thread, and must be quick; what it raises is logged, and goes no further."""

    def on_events(self, events: TimedEvents) -> None:
        """What has happened since the last call, in order."""
        ...

    def on_reset(self) -> None:
        """A step was cut short: all requests wait again, and all blocks are free and empty."""
        ...


class EventBus:
    """Carries events from those who emit them to those who listen."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._events: list[tuple[float, Event]] = []

    @property
    def has_listeners(self) -> bool:
        """Whether it is worth anybody's while to gather what an event would say."""
        return bool(self._listeners)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Tell a listener of all that comes; returns a function that ends it. Between two steps."""
        self._listeners += (listener,)

        def unsubscribe() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

        return unsubscribe

    def emit(self, event: type[Event], *args: Any) -> None:
        """Something has happened: the event's class, and its fields in their order."""
        if self._listeners:
            self._events.append((time.perf_counter(), event(*args)))

    def flush(self) -> None:
        """Tell the listeners: all that was emitted has really happened."""
        if self._events:
            events, self._events = self._events, []
            self._tell(lambda listener: listener.on_events(events))

    def reset(self) -> None:
        """Forget what was emitted: it has not happened."""
        self._events = []
        self._tell(lambda listener: listener.on_reset())

    def _tell(self, call: Callable[[Listener], None]) -> None:
        for listener in self._listeners:
            try:
                call(listener)
            except Exception:  # nobody's answer may be lost because somebody watches
                logger.exception("A listener failed.")


def numbered(seq: int, seconds: float, event: Event) -> dict[str, Any]:
    """An event as a message of a stream: its number there, and the seconds since the stream's beginning."""
    return {"seq": seq, "time": round(seconds, 6)} | as_message(event)


def as_message(event: Event) -> dict[str, Any]:
    """An event as what JSON can say: its type and its fields."""
    values = (
        asdict(event)
        if isinstance(event, Step)
        else {field.name: getattr(event, field.name) for field in fields(event)}
    )
    return {"type": event.type} | values
