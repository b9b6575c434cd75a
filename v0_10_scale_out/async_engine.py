"""The only bridge between the event loop, where HTTP lives, and the engine's thread.

    event loop                                           engine thread
    submit, close   ──▶ commands (under a condition) ──▶ run before the next step
    RequestStream   ◀── one call_soon_threadsafe a step ◀── engine.step()

A third thread, alone, encodes prompts, which may be long, and renders chats; the others only look tokens up, which
changes nothing in a tokenizer. Everything else in this file runs on the event loop, but for `AsyncEngine._run` and what
comes after it. Knows no HTTP.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from common.errors import RequestError
from common.outputs import RequestOutput
from common.prompts import for_each
from common.sampling_params import SamplingParams

from .engine import LLMEngine
from .events import PaceChanged
from .pace import Pace

logger = logging.getLogger(__name__)
T = TypeVar("T")


class UnavailableError(Exception):
    """No request can be taken, or this one not be finished, for a reason that will pass: full, or shutting down."""


class EngineDeadError(Exception):
    """The engine's loop has ended by a fault of ours: nothing will be answered any more."""


class RequestFailedError(Exception):
    """A step failed for this one request; the others go on."""


class Observer(Protocol):
    """Who is told what happens, for metrics; called on the event loop."""

    def on_output(self, output: RequestOutput, seconds: float, is_first: bool) -> None:
        """A step has added to a request; `seconds` since it last did, or since the request came."""
        ...

    def on_abort(self, request_id: str, num_choices: int, reason: str) -> None:
        """A request has ended without an answer: `"abort"` (its reader has left) or `"error"`."""
        ...


class RequestStream:
    """What one caller is answered: the outputs of one prompt, or of several that were submitted together.

    For one reader, who leaves early by `close`. `first_time` and `last_time` are clock readings (`perf_counter()`) of
    the first and the latest output, 0 before there is one.
    """

    def __init__(self, num_prompts: int, arrival_time: float | None, abort: Callable[["RequestStream"], None]) -> None:
        self.arrival_time = time.perf_counter() if arrival_time is None else arrival_time
        self.first_time = self.last_time = 0.0
        self._num_unfinished = num_prompts
        self._outputs: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue()
        self._abort = abort

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """The deltas of every step, each with the index of its prompt."""
        num_unfinished = self._num_unfinished
        while num_unfinished:
            item = await self._outputs.get()
            if isinstance(item, Exception):
                try:
                    raise item
                finally:
                    del item  # the error's traceback holds this frame, which must not hold the error
            num_unfinished -= item[1].finished
            yield item

    def close(self) -> None:
        """Nobody reads any more: abort what has not ended."""
        self._abort(self)

    def put(self, index: int, output: RequestOutput, now: float) -> None:
        """Hand an output to the reader."""
        self.first_time, self.last_time = self.first_time or now, now
        self._outputs.put_nowait((index, output))

    def fail(self, error: Exception) -> None:
        """Raise an error at the reader, after what it has been given before."""
        self._outputs.put_nowait(error)


@dataclass(slots=True)
class _Request:
    """One request of the engine, on the event loop's side."""

    stream: RequestStream
    index: int
    num_choices: int  # that have not ended
    last_time: float


class AsyncEngine:
    """Runs an engine in a thread, and lets coroutines share it.

    Args:
        engine: driven by nobody else from now on.
        max_queued_requests: sequences that may wait; past it, requests are refused.
        observer: told of every output.
    """

    def __init__(self, engine: LLMEngine, *, max_queued_requests: int, observer: Observer) -> None:
        self.engine, self.max_queued_requests, self.observer = engine, max_queued_requests, observer
        self.accepting = True
        self.hurried = False  # set while shutting down: wait for nobody any more
        self._has_failed = False
        self._requests: dict[str, _Request] = {}
        self._calls: set[asyncio.Future[None]] = set()
        self._commands: deque[Callable[[], object]] = deque()
        self._num_submitted = 0  # sequences that stand in `_commands`
        self._stopping = False
        self._pace = Pace()
        self._condition = threading.Condition()  # guards the four above
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._num_tokenizing = 0
        # Whose requests failed in this step, and the errors' types; the engine's thread alone touches it. The engine is
        # given the list, and not `self`: it would hold what holds it, and errors hold the frames they came through.
        # Nothing but the garbage collector would then free its memory.
        failures = self._failures = list[tuple[str, str]]()
        engine.on_failure = lambda request_id, error: failures.append((request_id, type(error).__name__))

    def start(self) -> None:
        """Begin to step; called on the event loop that the outputs are to come to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's loop has not failed."""
        return not self._has_failed

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their turn."""
        with self._condition:  # a command takes its sequences from the one number to the other
            return self.engine.scheduler.num_waiting + self._num_submitted

    @property
    def pace(self) -> Pace:
        """How fast it steps."""
        return self._pace

    async def tokenize(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of the tokenizer in its thread; what it raises is raised here."""

        def job() -> T:
            self._check_accepting()  # once more: it may have waited behind long prompts
            return function(*args)

        self._check_accepting()
        if self._num_tokenizing >= self.max_queued_requests:
            raise UnavailableError(f"{self._num_tokenizing} requests wait to be tokenised: no more are taken.")
        self._num_tokenizing += 1
        try:
            return await self._loop.run_in_executor(self._tokenizing, job)
        finally:
            self._num_tokenizing -= 1

    def _check_accepting(self) -> None:
        if not self.accepting:
            raise UnavailableError("The server is shutting down.")

    def check_serving(self) -> None:
        """Raise `EngineDeadError`, or `UnavailableError` while shutting down; a full queue is no fault."""
        if not self.is_alive:
            raise EngineDeadError("The engine has stopped after an internal error: restart the server.")
        self._check_accepting()

    def check_available(self, num_sequences: int) -> None:
        """Raise `EngineDeadError`, or `UnavailableError` where so many sequences more may not wait now.

        More than may wait at any time are a `RequestError`.
        """
        if num_sequences > self.max_queued_requests:
            raise RequestError(
                f"The request asks for {num_sequences} sequences (prompts times n), but at most "
                f"{self.max_queued_requests} may wait: ask for fewer at once.",
                param="n",
            )
        self.check_serving()
        if self.num_waiting + num_sequences > self.max_queued_requests:
            raise UnavailableError(
                f"The queue is full: {self.num_waiting} sequences wait, {num_sequences} more were asked for, and at "
                f"most {self.max_queued_requests} may wait."
            )

    def submit(
        self,
        request_id: str,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: SamplingParams,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Put a request into the queue.

        Args:
            request_id: of no other request.
            prompts: text, where there was one, and token ids of each; all of them are taken, or none.
            params: for all of them.
            arrival_time: by `time.perf_counter()`, if it came before now.
            cache_salt: only requests with the same one share blocks of the prefix cache.

        Raises:
            RequestError: one of them can never be served.
            UnavailableError: not now.
            EngineDeadError: never again.
        """
        self.check_serving()  # first: at the end of a server its engine is gone
        for_each(lambda prompt: self.engine.validate(prompt[1], params), prompts)
        num_sequences = len(prompts) * params.n
        self.check_available(num_sequences)
        stream = RequestStream(len(prompts), arrival_time, self._abort)
        ids = [f"{request_id}-{index}" for index in range(len(prompts))]
        for index, id_ in enumerate(ids):
            self._requests[id_] = _Request(stream, index, params.n, stream.arrival_time)

        def add() -> None:
            for id_, (text, token_ids) in zip(ids, prompts, strict=True):
                self.engine.add_request(
                    id_,
                    text,
                    params,
                    prompt_token_ids=token_ids,
                    arrival_time=stream.arrival_time,
                    cache_salt=cache_salt,
                )

        self.call_soon(add, num_sequences)
        return stream

    def call_soon(self, command: Callable[[], object], num_sequences: int = 0) -> None:
        """Have the engine's thread do something before its next step, which may put so many sequences in the queue."""
        with self._condition:
            self._commands.append(command)
            self._num_submitted += num_sequences
            self._condition.notify()

    async def call(self, command: Callable[[], object]) -> None:
        """Have the engine's thread do something, and wait until it is done; what it raises is raised here."""
        self.check_serving()
        done: asyncio.Future[None] = self._loop.create_future()
        self._calls.add(done)
        done.add_done_callback(self._calls.discard)

        def run() -> None:
            error: Exception | None = None
            try:
                command()
            except Exception as raised:
                error = raised
            self._loop.call_soon_threadsafe(_end, done, error)

        self.call_soon(run)
        await done

    def set_pace(self, *, paused: bool | None = None, delay: float | None = None, num_steps: int = 0) -> Pace:
        """Say how fast to step, and tell those who listen; what is left out stays as it is.

        Args:
            paused: whether not to step at all.
            delay: seconds between two steps.
            num_steps: that are made though it is paused.
        """
        with self._condition:
            self._pace = pace = self._pace.changed(paused, delay, num_steps)
            self._condition.notify()

        def tell() -> None:
            self.engine.events.emit(PaceChanged, pace.paused, pace.delay)
            self.engine.events.flush()

        self.call_soon(tell)
        return pace

    async def shutdown(self, timeout: float) -> None:
        """Take nothing more, let what runs end for `timeout` seconds, abort the rest, and end the threads."""
        self.accepting = False
        self.set_pace(paused=False, delay=0.0)
        end = time.monotonic() + timeout
        if self._requests and timeout:
            logger.warning(
                "Shutting down; still running: %d. They may end within %g s, a second Ctrl-C cuts them off.",
                len(self._requests),
                timeout,
            )
        while self._requests and self.is_alive and not self.hurried and time.monotonic() < end:
            await asyncio.sleep(0.01)
        if self._requests:
            logger.warning("Not ended in time, and aborted: %d.", len(self._requests))
        for stream in {request.stream for request in self._requests.values()}:
            self._abort(stream)
            stream.fail(UnavailableError("The server is shutting down: this answer was cut short."))
        with self._condition:
            self._stopping = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._tokenizing.shutdown)

    def _abort(self, stream: RequestStream) -> None:
        for id_ in [id_ for id_, request in self._requests.items() if request.stream is stream]:
            self._observe(self.observer.on_abort, id_, self._requests.pop(id_).num_choices, "abort")
            self.call_soon(partial(self.engine.abort_request, id_))

    def _deliver(self, outputs: list[RequestOutput], failures: list[tuple[str, str]], now: float) -> None:
        """Hand a step's outputs to their readers; those of a request that has been closed meanwhile have none."""
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            if output.finished:
                del self._requests[output.request_id]
            is_first = request.last_time == request.stream.arrival_time
            request.stream.put(request.index, output, now)
            self._observe(self.observer.on_output, output, now - request.last_time, is_first)
            request.last_time = now
            request.num_choices -= sum(choice.finish_reason is not None for choice in output.outputs)
        for id_, reason in failures:  # no more than the error's type: what is inside is for the log
            failed = self._requests.pop(id_, None)
            if failed is not None:
                self._observe(self.observer.on_abort, id_, failed.num_choices, "error")
                failed.stream.fail(RequestFailedError(f"The model failed on this request ({reason})."))
                self._abort(failed.stream)  # its other prompts

    def _die(self) -> None:
        for stream in {request.stream for request in self._requests.values()}:
            stream.fail(EngineDeadError("The engine has stopped after an internal error: its log says more."))
        for id_, request in self._requests.items():
            self._observe(self.observer.on_abort, id_, request.num_choices, "error")
        self._requests.clear()
        for call in list(self._calls):
            _end(call, EngineDeadError("The engine has stopped after an internal error: its log says more."))

    def _observe(self, method: Callable[..., None], *args: Any) -> None:
        try:
            method(*args)
        except Exception:  # nobody's answer may be lost to a metric
            logger.exception("The observer failed.")

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            while self._take_commands():
                if not self._may_step():
                    continue
                outputs = self.engine.step()
                if outputs or self._failures:
                    self._loop.call_soon_threadsafe(self._deliver, outputs, self._failures.copy(), time.perf_counter())
                    self._failures.clear()
        except BaseException:
            logger.exception("The engine's loop has ended.")
            self._has_failed = True
            self._loop.call_soon_threadsafe(self._die)

    def _take_commands(self) -> bool:
        """Do what the event loop has asked for, and wait while there is nothing to do at all; false at the end."""
        with self._condition:
            while not (self._commands or self._stopping):
                seconds = self._pace.seconds_left() if self.engine.has_unfinished_requests() else None
                if seconds == 0:
                    break
                self._condition.wait(seconds)
            commands = list(self._commands)
            self._commands.clear()
            for command in commands:
                command()
            self._num_submitted = 0
            return not self._stopping

    def _may_step(self) -> bool:
        """Whether it is time, and if so count the step: after commands, which may have come before it was."""
        with self._condition:
            if not self.engine.has_unfinished_requests() or self._pace.seconds_left() != 0:
                return False
            self._pace = self._pace.stepped()
            return True


def _end(done: "asyncio.Future[None]", error: Exception | None) -> None:
    """Tell whoever waits, unless he has left."""
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
