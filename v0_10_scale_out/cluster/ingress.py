"""The ingress stands before all replicas: it reads a request, has one of them answer it, and outlives that one.

    client ─▶ Ray's proxy ─▶ Ingress ─▶ key of the prompt ─▶ router ─▶ Replica.asgi
                                ◀────────────── ASGI messages ──────────────┘ (joined: `joint.py`)

    a replica is lost before the client has seen a token       once more, elsewhere; then 503, or an error in its stream
    a replica is lost within a stream                          an error as the last event, and [DONE]
    no replica takes the request in time                       503 with Retry-After

    GET /metrics                                               of all replicas, and of the routing
    POST /reset_prefix_cache, /events/control                  said to all replicas
    GET /replicas                                              each replica: what it has, what was routed there, and why
    /replicas/NAME/...                                         of that replica, whatever the router would choose
    GET /visualizer/                                           all replicas side by side (`overview.py`)

Bodies, statuses and errors are the replicas' own. Only what has to be checked once is checked here: the key, the
page's origin, and how much of a body is read. Knows no Ray: `Replicas` is what it asks of it.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from typing import Any, Protocol
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import shown

from ..async_engine import UnavailableError
from ..server.bodies import LEAST_LIMIT, SMALL
from ..server.middleware import ApiKey, Faults, RequestLine, SameOrigin
from ..server.responses import respond
from ..server.server_args import ServerArgs
from .expositions import merge
from .keys import key_of
from .outgoing import NoReplicaError, Outgoing, ReplicaLostError, refusal, without_origin
from .overview import overview
from .replica import ACCEPTED
from .routing import Choice, Route

logger = logging.getLogger(f"{__package__}.routed")

ACCEPT_SECONDS = 60.0  # that a request waits until a replica takes it: a lost one is replaced in less
PROBE_SECONDS = 1.0  # the same for a probe
MOST_RECENT = 10  # prompts of which the page says where they went
PROBES = ("/health", "/ping")
PROMPTS = ("/v1/chat/completions", "/v1/completions")  # whose bodies have a prompt
TO_ALL = ("/reset_prefix_cache", "/events/control")
ONE = "/replicas/"  # and a name, in front of a path: that replica is meant
DONE_HERE = (b"authorization", b"origin")  # headers that the ingress has checked, and that no replica needs
SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "client"),
    *("server", "subprotocols", "extensions"),
)


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

    async def states(self) -> list[dict[str, Any]]:
        """`Replica.state` of each that can be reached."""
        ...

    async def max_body_bytes(self) -> int:
        """`Replica.max_body_bytes` of any."""
        ...


class Ingress:
    """The application that Ray's proxy calls.

    Args:
        replicas: what answers.
        args: the server's flags.
        keys: API keys, one of which a client must send; none lets everybody in.
    """

    def __init__(self, replicas: Replicas, args: ServerArgs, keys: list[str]) -> None:
        self._replicas = replicas
        self._root_path = args.root_path
        self._max_bytes = args.max_body_bytes  # else the replicas', once a body is so large that it matters
        self._accepting = True
        self._num_running = 0
        self._closing = asyncio.Event()  # set when those who only watch have to go
        self._cut = asyncio.Event()  # set when what still runs has to end
        self._recent: deque[dict[str, Any]] = deque(maxlen=MOST_RECENT)  # prompts, the last one first
        self._registry = CollectorRegistry()
        self._routed = Counter(
            "mini_vllm:routed_requests", "Requests that a replica has taken, by the rule that chose it.",
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
        scope = _addressed(scope, self._root_path)
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
        self._closing.set()
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
            await refusal(UnavailableError("The server is shutting down."))(scope, receive, send)
            return
        path, only = _path(scope), scope["state"]["only"]
        body = b""
        if scope["type"] == "http":
            read = await self._read(Headers(scope=scope), receive)
            if read is None:
                return  # the client has gone
            body = read
        if only is None and (response := await self._of_all(path, scope, body)):
            await response(scope, receive, send)
            return
        key = await _key(body) if path in PROMPTS else []
        seconds = PROBE_SECONDS if path in PROBES else ACCEPT_SECONDS
        is_request = scope["type"] == "http"  # a WebSocket has no end of its own that a drain could wait for
        self._num_running += is_request
        try:
            await self._until_gone(Outgoing(scope, send), Route(key, only=only), scope, body, receive, seconds)
        finally:
            self._num_running -= is_request

    async def _of_all(self, path: str, scope: Scope, body: bytes) -> Response | None:
        """The answer to what concerns all replicas; `None` for what one of them answers."""
        match scope.get("method"), path:
            case "GET" | "HEAD", "/metrics":
                return await self._metrics({**_passed_on(scope), "method": "GET"})
            case "GET" | "HEAD", "/replicas":
                return await self._states()
            case "GET" | "HEAD", _ if path.startswith("/visualizer"):
                return overview(path.removeprefix("/visualizer"), scope["query_string"].decode("latin-1"))
            case "POST", _ if path in TO_ALL:
                return await self._to_all(_passed_on(scope), body)
        return None

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body, read until it is too much; `None` where the client left within it.

        The replica refuses what is too much: by what is announced, or by what it is given.
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
        self, out: Outgoing, route: Route, scope: Scope, body: bytes, receive: Receive, seconds: float
    ) -> None:
        """Pass the answer on until its end, or until the client leaves, or until the drain's time is over."""
        scope["state"]["route"] = route
        ends = self._cut if scope["type"] == "http" else self._closing
        passing = asyncio.ensure_future(self._pass(out, route, _passed_on(scope), body, seconds))
        gone, cut = asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(ends.wait())
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

    async def _pass(self, out: Outgoing, route: Route, scope: Scope, body: bytes, seconds: float) -> None:
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
            except NoReplicaError as error:
                await out.fail(error)
                return
            except TimeoutError:
                await out.fail(UnavailableError(f"No replica has taken the request within {seconds:g} seconds."))
                return

    async def _pass_once(self, out: Outgoing, route: Route, scope: Scope, body: bytes, seconds: float) -> None:
        async with contextlib.aclosing(self._replicas.ask(route, scope, body)) as answer:
            first = await asyncio.wait_for(anext(answer), seconds)
            assert first[0]["type"] == ACCEPTED
            replica = first[0]["replica"]
            if route.only not in (None, replica):
                raise NoReplicaError(f"There is no replica {shown(route.only)} here.")
            if route.choice is not None:
                self._note(scope, replica, route.choice, len(route.key))
            async for messages in answer:
                for message in messages:
                    await out.send(message)

    def _note(self, scope: Scope, replica: str, choice: Choice, num_blocks: int) -> None:
        """This replica has taken a request, by this choice, with a key of so many blocks."""
        self._routed.labels(replica, choice.rule).inc()
        if _path(scope) in PROMPTS:
            self._recent.appendleft(
                {
                    "request_id": _request_id(scope),
                    "replica": replica,
                    "rule": choice.rule,
                    "num_held": choice.num_held,
                    "num_blocks": num_blocks,
                }
            )

    async def _to_all(self, scope: Scope, body: bytes) -> Response:
        """One answer for all of them: the first that is an error, else the first."""
        answers = await self._replicas.ask_all(scope, body)
        if not answers:
            return refusal(UnavailableError("No replica is there."))
        _, status, headers, content = next((answer for answer in answers if answer[1] >= 400), answers[0])
        response = Response(content, status)
        response.raw_headers = without_origin(headers)
        return response

    async def _metrics(self, scope: Scope) -> Response:
        """Of all replicas, and of the routing."""
        answers = await self._replicas.ask_all(scope, b"")
        expositions = {name: content.decode() for name, status, _, content in sorted(answers) if status == 200}
        text = merge(expositions) + generate_latest(self._registry).decode()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _states(self) -> Response:
        """For the page that shows them all: each replica, what it was given, and where the last prompts went."""
        routed: dict[str, dict[str, int]] = defaultdict(dict)
        for sample in next(iter(self._routed.collect())).samples:
            if sample.name.endswith("_total"):
                routed[sample.labels["replica"]][sample.labels["rule"]] = int(sample.value)
        states = sorted(await self._replicas.states(), key=lambda state: str(state["name"]))
        replicas = [state | {"routed": routed[state["name"]]} for state in states]
        return respond({"replicas": replicas, "recent": list(self._recent)})

    def _log(self, scope: Scope, status: int) -> None:
        """Where a request went, and why. Its replica's own line has the same id, and says what came of it."""
        words = [f"{scope.get('method', 'WEBSOCKET')} {scope['path']} {status}", f"request_id={_request_id(scope)}"]
        route = scope.get("state", {}).get("route")
        if route is not None and route.choice is not None:
            choice = route.choice
            words += [f"replica={choice.replica}", f"rule={choice.rule}", f"held={choice.num_held}/{len(route.key)}"]
        logger.info("%s", " ".join(words).encode("unicode_escape").decode())


def _addressed(scope: Scope, root_path: str) -> Scope:
    """The scope with the path behind `/replicas/NAME`, and with that name in its state (`only`), else `None`."""
    path, state = scope["path"].removeprefix(root_path), scope.get("state", {}) | {"only": None}
    if path.startswith(ONE):
        name, slash, rest = path.removeprefix(ONE).partition("/")
        if slash:
            state["only"] = name
            scope = {**scope, "path": f"/{rest}", "raw_path": quote(f"/{rest}").encode()}
    return {**scope, "state": state}


def _path(scope: Scope) -> str:
    """Behind what a proxy has put in front."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


def _request_id(scope: Scope) -> str:
    return Headers(scope=scope).get("x-request-id", "-")


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


async def _live(receive: Receive, send: Send) -> None:
    """ASGI's lifespan: there is nothing to begin or to end."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})
