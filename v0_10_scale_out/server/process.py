"""The process around the app: what it says at the start, how it serves, and its end.

After SIGTERM or Ctrl-C nothing new is taken, what runs may end within `--shutdown-timeout`, the rest is cut short with
an error at the end of its stream, and the exit code is 0. A second signal does not wait.
"""

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

from .server_args import ServerArgs

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from ..engine import LLMEngine


def welcome(
    name: str, engine: "LLMEngine", url: str, args: ServerArgs, has_keys: bool, defaults: dict[str, Any]
) -> str:
    """What is served, how much fits, and a line to try."""
    dtype = str(engine.model.dtype).removeprefix("torch.")
    key = "\n    -H 'Authorization: Bearer YOUR_KEY' \\" if has_keys else ""
    where, curl = (url, "curl -N") if args.uds is None else (args.uds, f"curl -N --unix-socket {args.uds}")
    sampling = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    said = f"Where a request says nothing (generation_config.json): {sampling}\n" if sampling else ""
    return f"""{name}, {dtype} on {engine.model.device}
{engine.pool.explanation}
KV capacity: {engine.pool.num_tokens:,} tokens in all, up to {engine.max_model_len:,} a request
{said}Listening on {where} (Ctrl-C ends). Documentation: {url}/docs. Watch it: {url}/visualizer. Try:

  {curl} {url}/v1/chat/completions -H 'Content-Type: application/json' \\{key}
    -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "stream": true,
         "temperature": 0, "max_tokens": 100}}'
"""


async def serve(app: "FastAPI", args: ServerArgs, sockets: list[socket.socket]) -> None:
    """Serve `app` on bound sockets until a signal comes, and end it in order."""
    import uvicorn

    from .connection import Connection

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            # Uvicorn's own would raise the signal again at the end, and the exit code would not be 0.
            self.force_exit = app.state.engine.hurried = self.should_exit  # at the second signal
            self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            draining = asyncio.ensure_future(app.state.engine.shutdown(args.shutdown_timeout))
            closing = asyncio.ensure_future(super().shutdown(sockets))
            while not (closing.done() or self.force_exit):  # from Python 3.12 on, `closing` alone would not hurry
                if draining.done():
                    self._cut_half_requests()
                await asyncio.sleep(0.05)
            closing.cancel()
            await asyncio.wait({closing})
            await draining
            if self.force_exit:  # then uvicorn leaves it out, and Starlette complains
                await self.lifespan.shutdown()

        def _cut_half_requests(self) -> None:
            """Once all answers have ended: nothing would come of what is still being sent."""
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection) and connection.is_receiving():
                    connection.transport.close()

    await Server(uvicorn_config(app, args)).serve(sockets)


def uvicorn_config(app: "FastAPI", args: ServerArgs) -> "uvicorn.Config":
    """How uvicorn serves `app`."""
    import uvicorn

    from .connection import Connection

    return uvicorn.Config(
        app,
        http=Connection,  # h11's; httptools is a little faster, but answers HTTP/1.0 clients in chunks
        ws="websockets-sansio",
        ws_max_size=1024,  # bytes of a message from a viewer, who has nothing to say
        log_config=None,  # the root logger's format holds for all
        log_level=logging.WARNING,
        access_log=False,  # `middleware.AccessLog` knows more
        # Answers have ended by then; whoever does not read his is cut off.
        timeout_graceful_shutdown=int(args.shutdown_timeout) + 5,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
    )
