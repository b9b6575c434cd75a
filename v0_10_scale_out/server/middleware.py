"""What happens to every HTTP request before a route sees it, and after: the log line, the key, the size of the body.

Plain ASGI, since Starlette's `BaseHTTPMiddleware` would stand between a route and its client: it hides that the client
has left.
"""

import base64
import binascii
import contextlib
import hmac
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import shown

from ..async_engine import RequestStream
from .answers import Answer
from .errors import describe, error_response
from .responses import respond

logger, faults = logging.getLogger(f"{__package__}.access"), logging.getLogger(__name__)

GUARDED = ("/v1/", "/tokenize", "/detokenize", "/reset_prefix_cache", "/events")  # a probe and a scraper have no key
REQUESTS = ("http", "websocket")  # ASGI's scopes that somebody has asked for; a server's beginning and end are one, too
KEY_SUBPROTOCOL = "mini-vllm.key."  # and the key in base64url: how a page says it, which can set no header


class Faults:
    """Answers 500 for what nobody has foreseen.

    As the innermost one. Starlette's own place for it lies outside all of these: its answer would have no id and no
    CORS headers, and the connection would be closed after it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            if started:
                raise
            faults.exception("A request failed.")
            status, body, headers = describe(error)
            await respond(body, status, headers)(scope, receive, send)


class AccessLog:
    """One line for each request, when its answer has ended; and an id that client and log share (`X-Request-Id`)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] not in REQUESTS:
            await self.app(scope, receive, send)
            return
        # Printable and short, since it goes into a header and a log.
        given = "".join(filter(str.isprintable, Headers(scope=scope).get("x-request-id", "")))[:64]
        request_id = given.replace(" ", "") or uuid.uuid4().hex
        status = 499  # what the log says of a client that left before any answer
        state = scope.setdefault("state", {})
        state["arrival_time"] = start = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"].endswith("http.response.start"):  # a refused WebSocket's has a prefix
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            elif message["type"] == "websocket.accept":
                status = 101
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            milliseconds = (time.perf_counter() - start) * 1e3
            words = [
                f"{scope.get('method', 'WEBSOCKET')} {scope['path']} {status}",
                f"request_id={request_id}",
                f"ms={milliseconds:.1f}",
            ]
            if "answer" in state:
                words += _generation(state["answer"], state["stream"])
            # A path and an id are the client's: neither may write a line of its own into the log.
            logger.info("%s", " ".join(words).encode("unicode_escape").decode())


def _generation(answer: Answer, stream: RequestStream) -> list[str]:
    """What was generated: no word of it, only numbers."""
    totals = answer.totals
    words = [
        f"id={answer.id}",
        f"prompt_tokens={totals.num_prompt_tokens}",
        f"cached_tokens={sum(totals.num_cached_tokens.values())}",
        f"output_tokens={totals.num_output_tokens}",
    ]
    if stream.first_time:
        words.append(f"ttft_ms={(stream.first_time - stream.arrival_time) * 1e3:.1f}")
    num_tokens = max((len(choice.token_ids) for choice in totals.choices.values()), default=0)
    if num_tokens > 1:
        words.append(f"tpot_ms={(stream.last_time - stream.first_time) * 1e3 / (num_tokens - 1):.1f}")
    words.append(f"finish={'error' if totals.failed else ','.join(totals.finish_reasons) or 'abort'}")
    words.append(f"preemptions={totals.num_preemptions}")
    if totals.num_draft_tokens:
        words.append(f"accepted={totals.num_accepted_tokens}/{totals.num_draft_tokens}")
    return words


class RequestLine:
    """What of a request's first line frameworks leave out (RFC 9110 and 9112), and the prefix of `--root-path`.

    `GET http://host/health`, as to a proxy, is `GET /health`. Whatever takes GET takes HEAD, too, and answers the same
    without its body, which uvicorn does not send.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app, self.root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] in REQUESTS:
            scope = {**scope, "root_path": self.root_path}
        if scope["type"] == "http":
            if scope["path"].lower().startswith(("http://", "https://")):
                # Split before %2F is a slash. Who the host is does not matter, nor whether it can be one (`http://[/`).
                raw_path = b"/" + scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
                scope.update(path=unquote(raw_path.decode("latin-1")), raw_path=raw_path)
            if scope["method"] == "HEAD":
                scope["method"] = "GET"
        await self.app(scope, receive, send)


class ApiKey:
    """Lets in who sends one of the keys as `Authorization: Bearer KEY`; without keys, everybody."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if self.keys and scope["type"] in REQUESTS and guards(scope, GUARDED):
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            given = key.strip(" \t").encode("latin-1", "replace")
            if not key and scope["type"] == "websocket" and (said := _key_of_a_page(scope["subprotocols"])):
                scheme, key, given = "bearer", "a page's", said
            # Every key is compared, in constant time: how long it takes tells nothing.
            known = [hmac.compare_digest(given, expected) for expected in self.keys]
            if scheme.lower() != "bearer" or not any(known):
                message = "This server needs an API key: send it as `Authorization: Bearer KEY`."
                if key:
                    message = "The API key is wrong."
                response = error_response(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


class SameOrigin:
    """Refuses pages of other origins what shows everybody's prompts (`/events`), and what slows everybody down.

    Browsers let any page open a WebSocket to any server, and send its name along. `--allowed-origins` lets others in by
    their names; its `*`, the default, is for the API, and does not count here.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self.app, self.allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] in REQUESTS and guards(scope, ("/events",)):
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and origin not in self.allowed and urlsplit(origin).netloc != headers.get("host"):
                message = f"Pages of {shown(origin)} may not watch this server: name them in --allowed-origins."
                await error_response(403, message, code="origin_not_allowed")(scope, receive, send)
                return
        await self.app(scope, receive, send)


def guards(scope: Scope, prefixes: tuple[str, ...]) -> bool:
    """Whether a path is below one of these."""
    # With --root-path a route answers under the prefix as well as without it: both ways lead through here.
    paths = (scope["path"], scope["path"].removeprefix(scope.get("root_path", "")))
    return any(path.startswith(prefixes) for path in paths)


def _key_of_a_page(subprotocols: Sequence[str]) -> bytes | None:
    """The API key among the subprotocols that a page asks for."""
    for protocol in subprotocols:
        if protocol.startswith(KEY_SUBPROTOCOL):
            encoded = protocol.removeprefix(KEY_SUBPROTOCOL)
            with contextlib.suppress(binascii.Error, ValueError):
                return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    return None


class BodyLimit:
    """Refuses bodies of more than `max_bytes`, announced or not, before they fill the memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        message = f"The body is over {self.max_bytes} bytes, the most that this server takes."
        announced = Headers(scope=scope).get("content-length", "0") if scope["type"] == "http" else "0"
        if announced.isdecimal() and int(announced) > self.max_bytes:
            await error_response(413, message, code="request_too_large")(scope, receive, send)
            return
        size = 0

        async def counting() -> Any:
            nonlocal size
            part = await receive()
            size += len(part.get("body", b""))
            if size > self.max_bytes:
                raise HTTPException(413, message)
            return part

        await self.app(scope, counting, send)
