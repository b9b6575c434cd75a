"""What the ingress sends to a client: a replica's answer, or why there is none.

A replica may be lost at any moment. As long as the client has seen nothing of the answer itself, another replica can
begin again, and the client notices nothing. A stream's head and the comments that keep it open don't count: they are
the same whoever answers. Any other answer's head is held back until there is something behind it.
"""

from collections.abc import Iterable, Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from ..server.errors import RETRY_AFTER, describe, error_body
from ..server.responses import ErrorBody, respond, to_json


class ReplicaLostError(Exception):
    """The replica has ended, or cannot be reached, before its answer was complete."""


class NoReplicaError(Exception):
    """The replica that was asked for by its name is not here."""


class Outgoing:
    """One answer on its way to the client.

    Args:
        scope: ASGI's, of the request.
        send: ASGI's, to the client.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._head: Message | None = None  # of the answer that comes now
        self._is_stream = False  # whether a stream's head has been sent
        self.has_begun = False  # whether the client has seen a part of the answer itself

    async def send(self, message: Message) -> None:
        """Pass on a message of a replica's app."""
        if message["type"] == "http.response.start":
            self._head = {**message, "headers": without_origin(message["headers"])}
            if _is_stream(message) and not self._is_stream:
                self._is_stream = True
                await self._send(self._head)
        elif self._is_stream and self._head is not None and not _is_stream(self._head):
            await self._send_event(message.get("body", b"").decode())  # the second replica refuses
        else:
            if not self.has_begun and self._head is not None and not self._is_stream:
                await self._send(self._head)
            is_comment = self._is_stream and message.get("body", b"").startswith(b":")
            self.has_begun = self.has_begun or not is_comment
            await self._send(message)

    async def fail(self, error: Exception) -> None:
        """The answer will not be completed: say why, in the form in which that can still be said.

        Raises:
            Exception: the error, where nothing can be said any more: behind half a body of JSON. The connection breaks.
        """
        if self._scope["type"] == "websocket":
            await self._send({"type": "websocket.close", "code": 1011, "reason": str(error)})
        elif self._is_stream:
            await self._send_event(to_json(_described(error)[1]))
        elif not self.has_begun:
            await refusal(error)(self._scope, _no_message, self._send)
        else:
            raise error

    async def _send_event(self, body: str) -> None:
        self.has_begun = True
        event = f"data: {body}\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": event.encode(), "more_body": False})


def refusal(error: Exception) -> Response:
    """An error as a response of its own."""
    status, body, headers = _described(error)
    return respond(body, status, headers)


def without_origin(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A replica's headers without `Vary: Origin`: the ingress, which answers for origins, sends its own."""
    return [(name, value) for name, value in headers if (name, value) != (b"vary", b"Origin")]


def _is_stream(head: Message) -> bool:
    return Headers(raw=head["headers"]).get("content-type", "").startswith("text/event-stream")


def _described(error: Exception) -> tuple[int, ErrorBody, Mapping[str, str]]:
    """Status, body and headers, as the server has them for its own errors."""
    if isinstance(error, ReplicaLostError):
        message = "The replica that worked on this answer has ended, and the answer with it: ask again."
        return 503, error_body(message, "service_unavailable_error", code="replica_lost"), RETRY_AFTER
    if isinstance(error, NoReplicaError):
        return 404, error_body(str(error), "invalid_request_error", code="no_such_replica"), {}
    return describe(error)


async def _no_message() -> Message:
    raise RuntimeError("A refusal reads nothing.")
