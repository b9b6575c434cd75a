"""A replica: an engine with its whole server, reached by a call instead of a socket.

    ingress ──(route, scope, body)──▶ Replica.asgi ──▶ the app of `server/`, as it is
            ◀── lists of ASGI messages ──                a body, or a stream's events

The app does not notice. The ingress has checked the API key and the page's origin, and has taken both headers away.
Knows no Ray, so that it can be tested without.
"""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Scope

from ..server.app import API_KEY_VARIABLE
from ..server.server_args import ServerArgs
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
        app.state.engine.start()  # there is no lifespan here: the end of the process is the end

    async def asgi(self, route: Route, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """Answer a request: first `ACCEPTED`, then what the app sends, each time as much as there is.

        Closed early, it cancels the app's request, as a server does when a client leaves.

        Args:
            route: how it came here.
            scope: ASGI's, for HTTP or a WebSocket.
            body: the request's, whole.
        """
        yield [{"type": ACCEPTED, "replica": self.name}]
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        incoming = [_opening(scope, body)]

        async def receive() -> Message:
            if incoming:
                return incoming.pop()
            return await asyncio.Future()  # that the client leaves, the app is told by being cancelled

        async def send(message: Message) -> None:
            sent.put_nowait(message)

        task = asyncio.ensure_future(self.app(scope, receive, send))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while True:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                if told := [message for message in messages if message is not None]:
                    yield told
                if None in messages:
                    break
            await task  # what it raised is raised here
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

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
