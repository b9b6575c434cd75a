"""The answers of a replica, joined: one message for all that a step has brought, not one for each of its requests.

    Replica.asgi ─┐                                                        ┌─▶ answer 7 ─▶ client
    Replica.asgi ─┼─▶ Outbox ── [(7, message), (8, message), ...] ──▶ Inbox ─┼─▶ answer 8 ─▶ client
    Replica.asgi ─┘            one stream for each replica at work         └─▶ ...

A message through Ray costs both its ends some tenths of a millisecond, on the cores that compute here. With a message
for each of 16 requests in a step of 33 ms, more than a tenth of the tokens a second goes there. The call of a request
stays what it was. It is how the request is routed, cancelled and lost, only its messages come another way.

Knows no Ray, so that it can be tested without.
"""

import asyncio
import contextlib
import contextvars
import itertools
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Scope

from .outgoing import ReplicaLostError
from .routing import Route


@dataclass(frozen=True, slots=True)
class Address:
    """Where the messages of an answer go: which inbox, and which of its answers."""

    inbox: str
    number: int


PAUSE_SECONDS = 0.001  # before a replica's outbox is asked for once more
Queue = asyncio.Queue[Message | Exception | None]  # of an answer; `None` and an error are its end
Batch = list[tuple[int, Message | None]]  # each message with the number of its answer
Ask = Callable[[Route, Scope, bytes, Address | None], AsyncGenerator[list[Message], None]]
Read = Callable[[str, str], AsyncGenerator[Batch, None]]


class Outbox:
    """A replica's end: what waits for one inbox. It belongs to the replica's event loop."""

    def __init__(self) -> None:
        self._num_open = 0
        self._batch: Batch = []
        self._changed = asyncio.Event()
        self._reader: object = None

    @property
    def is_forgotten(self) -> bool:
        """Whether nothing is put into it, and nobody takes what is there."""
        return self._num_open == 0 and self._reader is None

    @contextlib.contextmanager
    def opened(self, number: int) -> Iterator[Callable[[Message | None], None]]:
        """To put an answer's messages, at the end `None`, while the block lasts."""

        def put(message: Message | None) -> None:
            self._batch.append((number, message))
            self._changed.set()

        self._num_open += 1
        try:
            yield put
        finally:
            self._num_open -= 1
            self._changed.set()

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """What waits, each time all of it, until no answer is open: a replica that drains waits for its streams.

        Another reader takes over: the one before may have been lost without a word.
        """
        self._reader = reader = object()
        self._changed.set()
        try:
            while self._reader is reader and (self._num_open or self._batch):
                if self._batch:
                    batch, self._batch = self._batch, []
                    yield batch
                else:
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            if self._reader is reader:
                self._reader = None


class Inbox:
    """The ingress's end: it asks, and hands what comes to the answers that it is for.

    Args:
        ask: `Replica.asgi` of the replica that the router chooses.
        read: `Replica.outbox` of the replica of this name, for the inbox of that name.
    """

    def __init__(self, ask: Ask, read: Read) -> None:
        self._ask, self._read = ask, read
        self._name = secrets.token_hex(8)  # a replica may outlive an ingress, and have an outbox for each
        self._numbers = itertools.count()
        self._answers: dict[int, Queue] = {}
        self._open: defaultdict[str, set[int]] = defaultdict(set)  # numbers, by replica
        self._readers: dict[str, asyncio.Task[None]] = {}

    async def ask(self, route: Route, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """See `ingress.Replicas`."""
        number = next(self._numbers)
        answer = self._answers[number] = Queue()  # from now on: its messages may be here before it is accepted
        try:
            async with contextlib.aclosing(self._ask(route, scope, body, Address(self._name, number))) as call:
                accepted = await anext(call)
                yield accepted
                with self._read_from(accepted[0]["replica"], number):
                    async with _followed(call, answer):
                        async for messages in until_end(answer):
                            yield messages
        finally:
            del self._answers[number]

    @contextlib.contextmanager
    def _read_from(self, replica: str, number: int) -> Iterator[None]:
        self._open[replica].add(number)
        if replica not in self._readers:
            # In a context of its own. In that of the request which needs it first, Ray would take it for a part of that
            # request: known by the same id, and cancelled with it.
            loop = asyncio.get_running_loop()
            self._readers[replica] = loop.create_task(self._hand_out(replica), context=contextvars.Context())
        try:
            yield
        finally:
            self._close(replica, number)

    async def _hand_out(self, replica: str) -> None:
        """For as long as an answer of this replica is open."""
        try:
            while replica in self._open:
                async with contextlib.aclosing(self._read(replica, self._name)) as batches:
                    async for batch in batches:
                        for number, message in batch:
                            self._hand_on(replica, number, message)
                if replica in self._open:  # by answers that have just begun, or whose calls are about to fail
                    await asyncio.sleep(PAUSE_SECONDS)
        except (Exception, asyncio.CancelledError) as error:  # Ray's cancellations, too: nobody here cancels it
            for number in self._open.get(replica, ()):
                self._answers[number].put_nowait(ReplicaLostError(f"The stream of {replica} has ended: {error!r}"))
        finally:
            del self._readers[replica]

    def _hand_on(self, replica: str, number: int, message: Message | None) -> None:
        if number in self._answers:  # else its client has left
            self._answers[number].put_nowait(message)
        if message is None:
            self._close(replica, number)

    def _close(self, replica: str, number: int) -> None:
        """Nothing more comes; may be said twice."""
        numbers = self._open.get(replica, set())
        numbers.discard(number)
        if not numbers:
            self._open.pop(replica, None)


async def until_end(answer: Queue) -> AsyncGenerator[list[Message], None]:
    """An answer's messages, each time as many as there are, until `None`.

    Raises:
        Exception: one that came.
    """
    while True:
        came = [await answer.get()]
        while not answer.empty():
            came.append(answer.get_nowait())
        if messages := [message for message in came if not (message is None or isinstance(message, Exception))]:
            yield messages
        for end in came:
            if isinstance(end, Exception):
                raise end
        if None in came:
            return


@contextlib.asynccontextmanager
async def _followed(call: AsyncGenerator[Any, None], answer: Queue) -> AsyncGenerator[None, None]:
    """A call that fails says so in its answer; one that ends well has said so through the outbox."""

    async def follow() -> None:
        try:
            async for _ in call:
                pass
        except asyncio.CancelledError:  # by Ray; or by the lines below, when nobody reads any more
            answer.put_nowait(ReplicaLostError("The call was cancelled."))
        except Exception as error:
            answer.put_nowait(error)

    following = asyncio.ensure_future(follow())
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait((following,))
