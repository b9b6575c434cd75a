"""Reads the bodies that clients send, without letting one of them hold up everybody else.

    Content-Length, or bytes as they come    more than `max_body_bytes`: 413, before anything is read
    lists, objects and values                more than the two limits below: 400, before Python makes objects of them
    JSON and the schema                      in a thread, unless the body is small

Reading JSON holds the interpreter's lock to its end, whatever the thread, so that its time must have a limit, too.
What of a body is too long for the model is known a little later: `serving.py`.
"""

import asyncio
import email.message
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common.errors import RequestError
from common.tokenizer import Tokenizer

from .errors import ClientGoneError

LEAST_LIMIT, MOST_LIMIT = 2**20, 8 * 2**20  # of a body's bytes, unless the operator says otherwise
ESCAPES = 4  # bytes of JSON for one of text: `\n` takes 2, and with clients that write ASCII only "é" takes 6 for 2
MAX_CONTAINERS = 50_000  # a tenth of a second of JSON: each costs some 2 µs, with the garbage collector's part
MAX_VALUES = 500_000
SMALL = 2**16  # a body of so many bytes is read at once: a thread would take longer


def default_limit(tokenizer: Tokenizer, max_model_len: int) -> int:
    """Bytes of the largest body that may make sense: a text that fills the context with the longest of tokens."""
    bound = tokenizer.length_bound
    longest = max_model_len * bound.longest * ESCAPES if bound is not None else MOST_LIMIT
    return min(max(longest, LEAST_LIMIT), MOST_LIMIT)


class BodyRoute(APIRoute):
    """A route whose body is read here; FastAPI still writes the document from the function's signature.

    The function takes the body and the request, in this order.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        if self.body_field is None:
            return super().get_route_handler()
        endpoint, model = self.endpoint, self.body_field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)

        async def handle(request: Request) -> Response:
            body = await read(request, model)
            return await endpoint(body, request)

        return handle


async def read(request: Request, model: type[BaseModel]) -> BaseModel:
    """The request's body as a `model`.

    Raises:
        RequestError: it has more parts than a body may have.
        RequestValidationError: it is no JSON, or not of the model's shape.
        HTTPException: it is too large, or JSON that Python cannot read.
        ClientGoneError: the client has left in the middle of it.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ClientGoneError("The client has closed the connection within its request.") from None
    is_json = _is_json(request.headers.get("content-type", ""))
    if len(raw) <= SMALL:
        return _parse(raw, is_json, model)
    return await asyncio.to_thread(_parse, raw, is_json, model)


def check_parts(raw: bytes) -> None:
    """Raise a `RequestError` for JSON of more lists, objects and values than a body may have.

    Counting bytes takes no time; only where a text may be what has them is it left out, which takes a little.
    """
    if _num_containers(raw) <= MAX_CONTAINERS and raw.count(b",") <= MAX_VALUES:
        return
    escapes = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(escapes.split(b'"')[::2])  # every second piece lies between two quotes
    if _num_containers(outside) > MAX_CONTAINERS or outside.count(b",") > MAX_VALUES:
        raise RequestError(
            f"The body has more parts than this server reads: {MAX_CONTAINERS} lists and objects, and {MAX_VALUES} "
            "values in them."
        )


def _num_containers(raw: bytes) -> int:
    return raw.count(b"[") + raw.count(b"{")


def _parse(raw: bytes, is_json: bool, model: type[BaseModel]) -> BaseModel:
    content: Any = raw  # which is no object, and refused as such
    if is_json and raw:
        check_parts(raw)
        try:
            content = json.loads(raw)
        except json.JSONDecodeError as error:
            fault = {"type": "json_invalid", "loc": ("body", error.pos), "input": {}, "ctx": {"error": error.msg}}
            raise RequestValidationError([fault | {"msg": "JSON decode error"}]) from None
        except (ValueError, RecursionError):  # no UTF-8; a number with too many digits; nested too deep
            raise HTTPException(400) from None
    try:
        return model.model_validate(content)
    except ValidationError as error:
        # The first fault is told; a body may have a hundred thousand.
        [first, *_] = error.errors(include_url=False)
        raise RequestValidationError([first | {"loc": ("body", *first["loc"])}]) from None


def _is_json(content_type: str) -> bool:
    message = email.message.Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype() if message.get_content_maintype() == "application" else ""
    return subtype == "json" or subtype.endswith("+json")
