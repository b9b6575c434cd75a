"""Every way in which an HTTP request can go wrong, in OpenAI's form: `{"error": {message, type, param, code}}`.

    400  the request is wrong                 RequestError, or the body does not have the right shape
    401  no key, or a wrong one               middleware.py
    404  no such model, or path               UnknownModelError
    405  no such method for the path
    413  the body is too large                middleware.py
    499  the client has gone (nobody reads it; for the log)
    500  a fault of ours                      RequestFailedError, and whatever else is raised (middleware.py)
    503  full, shutting down, or dead         UnavailableError, EngineDeadError

What OpenAI calls these (`type`, `code`) is what its clients look at.
"""

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.errors import RequestError, shown

from ..async_engine import EngineDeadError, RequestFailedError, UnavailableError
from .responses import ErrorBody, ErrorObject, respond

OTHER_APIS = ("/v1/responses", "/v1/messages")  # what some clients ask for unless they are told otherwise
RETRY_AFTER = {"Retry-After": "1"}  # seconds; OpenAI's clients wait so long and try again


class UnknownModelError(Exception):
    """The request names a model that is not served here."""


class ClientGoneError(Exception):
    """The client has closed the connection before its answer was complete."""


def error_body(message: str, type_: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    """OpenAI's error object."""
    # A lone surrogate in what the caller wrote (JSON can hold one) cannot be sent back as UTF-8.
    message = message.encode("utf-8", "backslashreplace").decode()
    return ErrorBody(error=ErrorObject(message=message, type=type_, param=param, code=code))


def error_response(
    status: int,
    message: str,
    type_: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error as a whole answer."""
    return respond(error_body(message, type_, param, code), status, headers)


def describe(error: Exception) -> tuple[int, ErrorBody, dict[str, str]]:
    """Status, body and headers for what was raised; within a stream that has begun, only the body can be sent."""
    if isinstance(error, RequestError):
        return 400, error_body(str(error), "invalid_request_error", error.param, error.code), {}
    if isinstance(error, UnknownModelError):
        return 404, error_body(str(error), "invalid_request_error", "model", "model_not_found"), {}
    if isinstance(error, ClientGoneError):
        return 499, error_body(str(error), "client_closed_request"), {}
    if isinstance(error, UnavailableError):
        return 503, error_body(str(error), "service_unavailable_error"), RETRY_AFTER
    if isinstance(error, EngineDeadError):
        return 503, error_body(str(error), "service_unavailable_error", code="engine_dead"), {}
    if isinstance(error, RequestFailedError):
        return 500, error_body(str(error), "server_error"), {}
    message = f"The server failed ({type(error).__name__}); its log says more. The request itself may be right."
    return 500, error_body(message, "server_error"), {}


def install(app: FastAPI) -> None:
    """Have the app answer every error so."""

    async def described(_: Request, error: Exception) -> Response:
        status, body, headers = describe(error)
        return respond(body, status, headers)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = shown(request.scope["path"])[1:-1], shown(request.method)[1:-1]
        known = {
            400: "The body cannot be read as JSON.",  # FastAPI gives no reason
            404: f"There is no {path} here.",
            405: f"{path} does not take {method}.",
        }
        message = known.get(error.status_code, str(error.detail) or HTTPStatus(error.status_code).phrase)
        if error.status_code == 404 and path.endswith(OTHER_APIS):
            message = f"{known[404]} Send it to /v1/chat/completions: most clients have a setting for it."
        code = "request_too_large" if error.status_code == 413 else None
        return error_response(error.status_code, message, code=code, headers=error.headers)

    async def invalid_body(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = _first_fault(error)
        return error_response(400, message, param=param)

    for kind in (
        RequestError,
        UnknownModelError,
        ClientGoneError,
        UnavailableError,
        EngineDeadError,
        RequestFailedError,
    ):
        app.add_exception_handler(kind, described)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid_body)


def _first_fault(error: RequestValidationError) -> tuple[str, str | None]:
    """Pydantic's first complaint as a sentence, and the field it is about."""
    fault = error.errors()[0]
    if fault["type"] == "string_unicode" and len(fault["loc"]) < 2:
        return f"The body has a field whose name is not valid Unicode: {shown(fault['input'])}.", None
    # ("body", "messages", 0, "content"), where unions and their members put names of their own in between.
    loc = [shown(part)[1:-1] if isinstance(part, str) else part for part in fault["loc"][1:]]
    where = [part for part in loc if isinstance(part, int) or part.isidentifier()]
    if fault["type"] == "json_invalid":
        return f"The body is not valid JSON: {fault['ctx']['error']}.", None
    if not where:
        return "The body must be a JSON object, sent with Content-Type: application/json.", None
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).removeprefix(".")
    if fault["type"] == "missing":
        return f"{name} is missing.", str(where[0])
    got = "" if isinstance(fault["input"], dict | list) else f", got {shown(fault['input'])}"
    return f"{name}: {fault['msg'][0].lower()}{fault['msg'][1:]}{got}.", str(where[0])
