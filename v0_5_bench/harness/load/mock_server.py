"""A server of known timing, to measure load generators with: `python -m v0_5_bench.harness.load.mock_server`.

It answers completions and chats of any prompt: the first token `FIRST` seconds after the request has come, each further
one `STEP` seconds later, one a chunk, and the usage at the end. The moments are planned from the request's arrival, so
that being late once does not make everything later. Also a test's server: what a client reports must be these figures.
"""

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

FIRST, STEP = 0.2, 0.01


def build_app() -> Any:
    """The application."""
    from fastapi import FastAPI, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse

    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "mock", "object": "model"}]})

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> Response:
        arrival = time.perf_counter()
        body = await request.json()
        num_tokens = body.get("max_completion_tokens") or body["max_tokens"]
        prompt = body.get("prompt", [])

        async def events() -> AsyncIterator[str]:
            for i in range(num_tokens):
                await asyncio.sleep(arrival + FIRST + i * STEP - time.perf_counter())
                choice = {"index": 0, "text": "a", "delta": {"content": "a"}}
                yield _event({"choices": [choice | {"finish_reason": "length" if i == num_tokens - 1 else None}]})
            num_prompt_tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split())
            usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}
            yield _event({"choices": [], "usage": usage | {"total_tokens": num_prompt_tokens + num_tokens}})
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps({'id': 'mock', 'object': 'text_completion', 'created': 0, 'model': 'mock'} | chunk)}\n\n"


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal comes."""
    import uvicorn

    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    args = parser.parse_args(argv)
    listener = socket.create_server(("127.0.0.1", args.port))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as our server's, see there
    print(f"Listening on http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    # Not uvloop's loop, where that is installed: its timers count whole milliseconds, and may end a sleep too early.
    config = uvicorn.Config(build_app(), log_level="warning", http="h11", loop="asyncio")
    uvicorn.Server(config).run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
