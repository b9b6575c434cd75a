"""A replica: an engine with its whole server, reached by a call instead of a socket.

    ingress ──(route, scope, body)──▶ Replica.asgi ──▶ the app of `server/`, as it is
            ◀── lists of ASGI messages ──                a body, or a stream's events; as a rule by `joint.py`

The app does not notice. The ingress has checked the API key and the page's origin, and has taken both headers away.
Knows no Ray, so that it can be tested without.
"""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Scope

from ..server.app import API_KEY_VARIABLE
from ..server.server_args import ServerArgs
from .joint import Address, Batch, Outbox, Queue, until_end
from .routing import Route

if TYPE_CHECKING:
    from fastapi import FastAPI

ACCEPTED = "replica.accepted"  # the type of the first message, which is none of ASGI's: the replica has the request


class Replica:
    """Made on the event loop that calls its methods.

    Args:
        name: told to the ingress with each answer.
        app: the server's, made with `behind_ingress`.
    """

    def __init__(self, name: str, app: "FastAPI") -> None:
        self.name, self.app = name, app
        self._outboxes: dict[str, Outbox] = {}  # by their inbox
        app.state.engine.start()  # there is no lifespan here: the end of the process is the end

    async def asgi(
        self, route: Route, scope: Scope, body: bytes, to: Address | None = None
    ) -> AsyncGenerator[list[Message], None]:
        """Answer a request: first `ACCEPTED`, then what the app sends, each time as much as there is.

        Closed early, it cancels the app's request, as a server does when a client leaves.

        Args:
            route: how it came here.
            scope: ASGI's, for HTTP or a WebSocket.
            body: the request's, whole.
            to: where else the app's messages go; then nothing but `ACCEPTED` comes from here.
        """
        accepted: list[Message] = [{"type": ACCEPTED, "replica": self.name}]
        if to is not None:
            with self._outbox(to.inbox).opened(to.number) as put:
                yield accepted
                await self._run(scope, body, put)
                put(None)
            return
        yield accepted
        sent = Queue()
        task = asyncio.ensure_future(self._run(scope, body, sent.put_nowait))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            async for messages in until_end(sent):
                yield messages
            await task  # what it raised is raised here
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    async def outbox(self, route: Route, name: str, inbox: str) -> AsyncGenerator[Batch, None]:
        """The messages of all answers that go to this inbox, as long as one is open.

        Raises:
            ValueError: another replica is meant, which is no more.
        """
        if name != self.name:
            raise ValueError(f"This is {self.name}, not {name}.")
        async with contextlib.aclosing(self._outbox(inbox).batches()) as batches:
            async for batch in batches:
                yield batch

    def _outbox(self, inbox: str) -> Outbox:
        if inbox not in self._outboxes:  # a new ingress, as a rule: what is left for the one before goes
            self._outboxes = {name: outbox for name, outbox in self._outboxes.items() if not outbox.is_forgotten}
            self._outboxes[inbox] = Outbox()
        return self._outboxes[inbox]

    async def _run(self, scope: Scope, body: bytes, put: Callable[[Message], None]) -> None:
        incoming = [_opening(scope, body)]

        async def receive() -> Message:
            if incoming:
                return incoming.pop()
            return await asyncio.Future()  # that the client leaves, the app is told by being cancelled

        async def send(message: Message) -> None:
            put(message)

        await self.app(scope, receive, send)

    async def whole(self, scope: Scope, body: bytes) -> tuple[str, int, list[tuple[bytes, bytes]], bytes]:
        """Answer a request that all replicas are asked: this one's name, and its answer's status, headers and body."""
        status, headers, parts = 500, [], []
        async with contextlib.aclosing(self.asgi(Route(), scope, body)) as answer:
            async for messages in answer:
                for message in messages:
                    if message["type"] == "http.response.start":
                        status, headers = message["status"], list(message["headers"])
                    parts.append(message.get("body", b""))
        return self.name, status, headers, b"".join(parts)

    async def max_body_bytes(self) -> int:
        """Of the largest body that is read. It depends on the tokenizer, which the ingress does not have."""
        limit: int = self.app.state.max_body_bytes
        return limit

    async def check_health(self) -> None:
        """Called every few seconds: a replica whose engine has died is replaced."""
        if not self.app.state.engine.is_alive:
            raise RuntimeError("The engine has stopped after an internal error.")

    async def state(self) -> dict[str, Any]:
        """Which replica this is, and what its engine has."""
        engine = self.app.state.engine.engine
        manager = engine.scheduler.block_manager
        return {
            "name": self.name,
            "pid": os.getpid(),
            "num_running": len(engine.scheduler.running),
            "num_waiting": engine.scheduler.num_waiting,
            "num_blocks": manager.num_blocks,
            "num_free_blocks": manager.num_free_blocks,
        }


def behind_ingress(args: ServerArgs) -> ServerArgs:
    """A replica's flags: without keys and origins, which the ingress checks, and for which it sends the headers."""
    os.environ.pop(API_KEY_VARIABLE, None)
    return dataclasses.replace(args, api_key=None, allowed_origins="[]")


def _opening(scope: Scope, body: bytes) -> Message:
    if scope["type"] == "websocket":
        return {"type": "websocket.connect"}
    return {"type": "http.request", "body": body, "more_body": False}
