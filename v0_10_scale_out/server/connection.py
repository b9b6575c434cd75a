"""One client's connection: uvicorn's, which also notices that a client has left when it had sent more than a request.

A client may send bytes ahead: its next request, or a stray newline. Uvicorn's connection stops reading then, until the
answer before has gone out, and whoever does not read does not see that the other side closes. This one reads on, and
keeps what came early.
"""

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_EARLY = 2**20  # bytes that one connection may send ahead; past it we stop reading, as uvicorn does at once


class Connection(H11Protocol):
    """uvicorn's protocol for HTTP/1.1, over h11."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._early = bytearray()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._is_answering():
            self._early += data
        else:
            super().data_received(data)
        if self._is_answering():  # the request's last packet may have brought early bytes, at which uvicorn pauses
            if len(self._early) < MOST_EARLY:
                self.flow.resume_reading()
            else:
                self.flow.pause_reading()

    def on_response_complete(self) -> None:
        """The answer has gone out: what came early is next."""
        if self._early and not self.transport.is_closing():
            self.conn.receive_data(bytes(self._early))
            self._early.clear()
        super().on_response_complete()

    def is_receiving(self) -> bool:
        """Whether a request has begun to come, and not come to its end."""
        return self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
