"""What stands before all replicas: it reads a request, has it answered by one of them, and outlives that one.

    client ─▶ Ray's proxy ─▶ Ingress ─▶ key of the prompt ─▶ router ─▶ Replica.asgi
                                ◀────────────── ASGI messages ──────────────┘

    a replica is lost before the client has seen a token       once more, elsewhere; then 503
    within a stream                                            an error as its last event, and [DONE]
    no replica takes the request in time                       503 with Retry-After

Bodies, statuses and errors are the replicas' own. Here are only the checks that are made once: key, origin, and how
much of a body is read. Knows no Ray: `Replicas` is what it asks of it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..async_engine import UnavailableError
from ..server.bodies import LEAST_LIMIT, SMALL
from ..server.errors import RETRY_AFTER, describe, error_body
from ..server.middleware import ApiKey, Faults, RequestLine, SameOrigin
from ..server.responses import ErrorBody, respond, to_json
from ..server.server_args import ServerArgs
from .expositions import merge
from .keys import key_of
from .replica import ACCEPTED
from .routing import Route

logger = logging.getLogger(f"{__package__}.routed")

ACCEPT_SECONDS = 60.0  # that a request waits for a replica which takes it: a lost one is replaced in less
PROBE_SECONDS = 1.0  # the same for those who ask whether anybody is there
PROBES = ("/health", "/ping")
PROMPTS = ("/v1/chat/completions", "/v1/completions")  # whose bodies have a prompt
TO_ALL = ("/reset_prefix_cache", "/events/control")  # what is said to one is meant for all
DONE_HERE = (b"authorization", b"origin")  # headers that the ingress has looked at, and nobody else needs
SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "client"),
    *("server", "subprotocols", "extensions"),
)


class ReplicaLostError(Exception):
    """The replica has ended, or cannot be reached, before its answer was complete."""


class Replicas(Protocol):
    """The replicas, as the ingress sees them."""

    def ask(self, route: Route, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """`Replica.asgi` of the one that the router chooses; closed early, it ends there, too.

        Raises:
            ReplicaLostError: on the way.
        """
        ...

    async def ask_all(self, scope: Scope, body: bytes) -> list[tuple[str, int, list[tuple[bytes, bytes]], bytes]]:
        """`Replica.whole` of each that can be reached."""
        ...

    async def max_body_bytes(self) -> int:
        """`Replica.max_body_bytes` of any."""
        ...


class Ingress:
    """The application that Ray's proxy calls.

    Args:
        replicas: whoever answers.
        args: the server's flags.
        keys: API keys, one of which a client must send; none lets everybody in.
    """

    def __init__(self, replicas: Replicas, args: ServerArgs, keys: list[str]) -> None:
        self._replicas = replicas
        self._max_bytes = args.max_body_bytes  # else the replicas', once a body is so large that it matters
        self._accepting = True
        self._num_running = 0
        self._cut = asyncio.Event()  # set when what still runs has to end
        self._registry = CollectorRegistry()
        self._routed = Counter(
            "mini_vllm:routed_requests", "Requests that went to a replica, by the rule that chose it.",
            ["replica", "rule"], registry=self._registry,
        )  # fmt: skip
        self._retried = Counter("mini_vllm:retried_requests", "Requests sent once more.", registry=self._registry)
        self._lost = Counter("mini_vllm:lost_requests", "Answers that ended with a replica.", registry=self._registry)
        app: ASGIApp = Faults(self._answer)  # then as in the server, from the inside to the outside
        app = ApiKey(app, keys)
        app = SameOrigin(app, args.origins or [])
        app = RequestLine(app, args.root_path)
        self._app = CORSMiddleware(
            app,
            allow_origins=args.origins or [],
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        scope.setdefault("state", {})
        status = 499

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"].endswith("http.response.start"):
                status = message["status"]
                headers = MutableHeaders(scope=message)
                if "x-request-id" in headers:
                    del headers["x-request-id"]  # Ray's proxy sets it, to the same value
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            self._log(scope, status)

    async def drain(self, seconds: float) -> None:
        """Take nothing more, let what runs end for so long, and end the rest with an error."""
        self._accepting = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._num_running:
                    await asyncio.sleep(0.02)
        self._cut.set()
        for _ in range(100):
            if not self._num_running:
                break
            await asyncio.sleep(0.02)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What has passed all checks."""
        if not self._accepting:
            await _refusal(UnavailableError("The server is shutting down."))(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        body = b""
        if scope["type"] == "http":
            read = await self._read(Headers(scope=scope), receive)
            if read is None:
                return  # the client has gone
            body = read
        if path == "/metrics" and scope["method"] == "GET":
            await (await self._metrics(_passed_on(scope)))(scope, receive, send)
        elif path in TO_ALL and scope["method"] == "POST":
            await (await self._to_all(_passed_on(scope), body))(scope, receive, send)
        else:
            key = await _key(body) if path in PROMPTS else []
            seconds = PROBE_SECONDS if path in PROBES else ACCEPT_SECONDS
            self._num_running += 1
            try:
                await self._until_gone(_Outgoing(scope, send), Route(key), scope, body, receive, seconds)
            finally:
                self._num_running -= 1

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body, up to where it is too much; `None` where the client left within it.

        That it is too much, the replica says: of what is announced without a byte of it, else of what it is given.
        """
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and await self._is_too_much(int(announced)):
            return b""
        body = bytearray()
        while not await self._is_too_much(len(body)):
            part = await receive()
            if part["type"] == "http.disconnect":
                return None
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        return bytes(body)

    async def _is_too_much(self, num_bytes: int) -> bool:
        if self._max_bytes is None and num_bytes > LEAST_LIMIT:
            self._max_bytes = await self._replicas.max_body_bytes()
        return self._max_bytes is not None and num_bytes > self._max_bytes

    async def _until_gone(
        self, out: "_Outgoing", route: Route, scope: Scope, body: bytes, receive: Receive, seconds: float
    ) -> None:
        """Pass the answer on until its end, or until the client leaves, or until everything has to end."""
        scope["state"]["route"] = route
        passing = asyncio.ensure_future(self._pass(out, route, _passed_on(scope), body, seconds))
        gone, cut = asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait((passing, gone, cut), return_when=asyncio.FIRST_COMPLETED)
            if not passing.done() and not gone.done():
                passing.cancel()
                await asyncio.wait((passing,))
                await out.fail(UnavailableError("The server is shutting down: this answer was cut short."))
            elif passing.done():
                passing.result()
        finally:
            for task in (passing, gone, cut):
                task.cancel()
            await asyncio.wait((passing, gone, cut))

    async def _pass(self, out: "_Outgoing", route: Route, scope: Scope, body: bytes, seconds: float) -> None:
        """From a replica to the client; a second time where the first one was lost before the client saw anything."""
        for is_last in (False, True):
            try:
                await self._pass_once(out, route, scope, body, seconds)
                return
            except ReplicaLostError as error:
                logger.warning("A replica was lost: %s", error)
                if out.has_begun or is_last:
                    self._lost.inc()
                    await out.fail(error)
                    return
                self._retried.inc()
                route.avoid = route.choice.replica if route.choice is not None else None
            except TimeoutError:
                await out.fail(UnavailableError(f"No replica has taken the request within {seconds:g} seconds."))
                return

    async def _pass_once(self, out: "_Outgoing", route: Route, scope: Scope, body: bytes, seconds: float) -> None:
        async with contextlib.aclosing(self._replicas.ask(route, scope, body)) as answer:
            first = await asyncio.wait_for(anext(answer), seconds)
            assert first[0]["type"] == ACCEPTED
            if route.choice is not None:
                self._routed.labels(first[0]["replica"], route.choice.rule).inc()
            async for messages in answer:
                for message in messages:
                    await out.send(message)

    async def _to_all(self, scope: Scope, body: bytes) -> Response:
        """One answer for all of them: the first that is an error, else the first."""
        answers = await self._replicas.ask_all(scope, body)
        if not answers:
            return _refusal(UnavailableError("No replica is there."))
        _, status, headers, content = next((answer for answer in answers if answer[1] >= 400), answers[0])
        response = Response(content, status)
        response.raw_headers = _without_origin(headers)
        return response

    async def _metrics(self, scope: Scope) -> Response:
        """Of all replicas, and of the routing."""
        answers = await self._replicas.ask_all(scope, b"")
        expositions = {name: content.decode() for name, status, _, content in sorted(answers) if status == 200}
        text = merge(expositions) + generate_latest(self._registry).decode()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _log(self, scope: Scope, status: int) -> None:
        """Where a request went, and why; its replica's own line with the same id says what became of it."""
        request_id = Headers(scope=scope).get("x-request-id", "-")
        words = [f"{scope.get('method', 'WEBSOCKET')} {scope['path']} {status}", f"request_id={request_id}"]
        route = scope.get("state", {}).get("route")
        if route is not None and route.choice is not None:
            choice = route.choice
            words += [f"replica={choice.replica}", f"rule={choice.rule}", f"held={choice.num_held}/{len(route.key)}"]
        logger.info("%s", " ".join(words).encode("unicode_escape").decode())


class _Outgoing:
    """What the client is sent. Until it has seen a part of the answer itself, another replica may begin again.

    A stream's head goes out at once, and comments behind it do no harm. Any other answer's head is held back until
    there is something behind it.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._head: Message | None = None  # of the answer that comes now
        self._is_stream = False  # whether a stream's head has gone out
        self.has_begun = False

    async def send(self, message: Message) -> None:
        """A message of a replica's app."""
        if message["type"] == "http.response.start":
            self._head = {**message, "headers": _without_origin(message["headers"])}
            if _is_stream(message) and not self._is_stream:
                self._is_stream = True
                await self._send(self._head)
        elif self._is_stream and self._head is not None and not _is_stream(self._head):
            await self._send_event(message.get("body", b"").decode())  # the second replica refuses
        else:
            if not self.has_begun and self._head is not None and not self._is_stream:
                await self._send(self._head)
            self.has_begun = self.has_begun or not message.get("body", b"").startswith(b":")
            await self._send(message)

    async def fail(self, error: Exception) -> None:
        """The answer has no end of its own: say why, in the form that can still be said.

        Raises:
            Exception: the error, where there is none. Half a body is no JSON, and that the connection breaks tells it.
        """
        if self._scope["type"] == "websocket":
            await self._send({"type": "websocket.close", "code": 1011, "reason": str(error)})
        elif self._is_stream:
            await self._send_event(to_json(_described(error)[1]))
        elif not self.has_begun:
            await _refusal(error)(self._scope, _nothing, self._send)
        else:
            raise error

    async def _send_event(self, body: str) -> None:
        self.has_begun = True
        event = f"data: {body}\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": event.encode(), "more_body": False})


def _without_origin(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without what the ingress, which knows about origins, says itself."""
    return [(name, value) for name, value in headers if (name, value) != (b"vary", b"Origin")]


def _is_stream(head: Message) -> bool:
    return Headers(raw=head["headers"]).get("content-type", "").startswith("text/event-stream")


def _described(error: Exception) -> tuple[int, ErrorBody, Mapping[str, str]]:
    """Status, body and headers, as in the server."""
    if isinstance(error, ReplicaLostError):
        message = "The replica that worked on this answer has ended, and the answer with it: ask again."
        return 503, error_body(message, "service_unavailable_error", code="replica_lost"), RETRY_AFTER
    return describe(error)


def _refusal(error: Exception) -> Response:
    status, body, headers = _described(error)
    return respond(body, status, headers)


async def _key(body: bytes) -> list[bytes]:
    """In a thread, where it may take long."""
    if len(body) <= SMALL:
        return key_of(body)
    return await asyncio.to_thread(key_of, body)


def _passed_on(scope: Scope) -> Scope:
    """What of a scope goes to a replica: plain values, and no header whose work is done."""
    passed = {name: scope[name] for name in SCOPE if name in scope}
    passed["headers"] = [(name, value) for name, value in scope["headers"] if name not in DONE_HERE]
    return passed


async def _gone(receive: Receive) -> None:
    """Wait until the client has left; its body has been read."""
    while not (await receive())["type"].endswith(".disconnect"):
        pass


async def _nothing() -> Message:
    return await asyncio.Future()


async def _live(receive: Receive, send: Send) -> None:
    """ASGI's lifespan: there is nothing to begin or to end."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})
